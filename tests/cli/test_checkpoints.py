"""`fp8stack inspect` and `fp8stack convert`, on checkpoints of every kind and level, whole and damaged."""

import json
import os
import random
import re
import resource
import shutil
import warnings

import pytest
import torch
from helpers import refused_in_a_line
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_folder

import fp8stack
from fp8stack.__main__ import main
from fp8stack.checkpoint import master_state_dict, read_file
from fp8stack.errors import CheckpointError

NUMEL = 96 * 64 + 64 * 64 + 64  # the tie once
VARIANTS = {  # level, overrides, and in which formats moments and masters of the matrices are
    "plain": (None, {}, "float32", {}),
    "O0": ("O0", {}, "float32", {}),
    "O1": ("O1", {}, "float32", {}),
    "O2": ("O2", {}, "8-bit block 128", {("remainder", "int8"): 2}),
    "4bit": ("O2", {"states": "4bit", "master": "split32"}, "4-bit block 128", {("remainder", "int16"): 2}),
    "fp8-lm": ("O2", {"preset": "fp8-lm"}, "float16, one scale", {("master", "float16, one scale"): 2}),
}  # fmt: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(96, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3))


def make(level, **overrides):
    """Return a model and its optimizer after three steps. Its groups are in another order than its parameters."""
    torch.manual_seed(0)
    model = Tied()
    groups = [{"params": [model.inner.bias]}, {"params": [model.inner.weight, model.embed.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if level is not None:
        model, optimizer = fp8stack.initialize(model, optimizer, opt_level=level, **overrides)
    for _ in range(3):
        sum((p * torch.randn(p.shape)).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints: "O2.pt" and so on, and "dcp"; and the masters of each."""
    folder, masters = tmp_path_factory.mktemp("checkpoints"), {}
    for name, (level, overrides, *_) in VARIANTS.items():
        model, optimizer = make(level, **overrides)
        fp8stack.checkpoint.save(folder / f"{name}.pt", model, optimizer, step=250, loss=3.5)
        masters[name] = master_state_dict(model, optimizer)
        if name == "O2":
            weights, states = get_state_dict(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this is one process
                contents = {"model": weights, "optimizer": states, "epoch": 3}
                save_folder(contents, checkpoint_id=folder / "dcp")
            masters["dcp"] = masters[name]
    return folder, masters


def inspected(capsys, path):
    assert main(["inspect", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    data["formats"] = {(p["part"], p["format"]): p["tensors"] for p in data["parts"]}
    data["elements"] = sum(p["elements"] for p in data["parts"] if p["part"] == "model")
    return data


def converted(capsys, path, to, out):
    assert main(["convert", str(path), "--to", to, "--out", str(out), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", VARIANTS)
def test_inspect_reads_level_step_and_formats(name, saved, capsys):
    level, _, moments, masters = VARIANTS[name]
    data = inspected(capsys, saved[0] / f"{name}.pt")
    shown = None if level == "O0" else level
    assert (data["kind"], data["level"], data["step"]) == ("fp8stack.checkpoint", shown, 250)
    assert data["extra"] == {"step": 250, "loss": 3.5}
    assert data["elements"] == NUMEL + 3  # and the buffer
    assert data["file_bytes"] == (saved[0] / f"{name}.pt").stat().st_size
    assert data["formats"]["exp_avg_sq", "float32"] == (3 if moments == "float32" else 1)
    assert data["formats"]["exp_avg_sq", moments] == (3 if moments == "float32" else 2)
    assert {k: n for k, n in data["formats"].items() if k[0] in ("remainder", "master")} == masters
    sums = sum(p["bytes"] for p in data["parts"])
    assert 0.5 * data["file_bytes"] < sums < data["file_bytes"]


def test_inspect_reads_a_folder(saved, capsys):
    data = inspected(capsys, saved[0] / "dcp")
    assert data["kind"] == "torch.distributed.checkpoint"
    assert (data["level"], data["step"], data["extra"]) == ("O2", 3, {"epoch": 3})
    assert data["formats"]["exp_avg", "8-bit block 128"] == 2
    assert data["elements"] == NUMEL + 3 + 96 * 64  # which holds the tie twice
    assert main(["inspect", str(saved[0] / "dcp")]) == 0
    text = capsys.readouterr().out
    assert "step 3, O2" in text
    assert ["exp_avg", "8-bit", "block", "128", "2"] in [x.split()[:5] for x in text.splitlines()]


@pytest.mark.parametrize("name", [*(n for n in VARIANTS if n != "O0"), "dcp"])
def test_convert_puts_masters_together(name, saved, tmp_path, capsys):
    """All the bits that training had, in float32; ties stay ties, integers stay integers."""
    folder, masters = saved
    source = folder / (name if name == "dcp" else f"{name}.pt")
    told = converted(capsys, source, "fp32", tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert weights.keys() == masters[name].keys()
    own = {"head.weight", "embed.weight"} if name == "dcp" else set()  # one has the master
    for key, value in masters[name].items():
        assert weights[key].dtype == value.dtype
        assert key in own or torch.equal(weights[key], value), key
    if name == "dcp":  # which says no more that they are tied
        whole = masters[name]["head.weight"]
        assert sorted(torch.equal(weights[key], whole) for key in own) == [False, True]
    else:
        assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    assert told["masters"] == (0 if name in ("plain", "O1") else 2)
    Tied().load_state_dict(weights)


@pytest.mark.parametrize(("level", "masters"), [(None, 0), ("O1", 0), ("O2", 2)])
def test_two_state_dicts_of_torch_save_are_read(level, masters, tmp_path, capsys):
    """With the masters' bits, by the names that `initialize` leaves: groups are in another order than weights."""
    model, optimizer = make(level)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    torch.save(both, tmp_path / "run.pt")
    data = inspected(capsys, tmp_path / "run.pt")
    assert (data["kind"], data["level"], data["step"]) == ("torch.save", level, 3)
    assert (data["elements"], data["extra"]) == (NUMEL + 3, {"epoch": 4})
    told = converted(capsys, tmp_path / "run.pt", "fp32", tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    expected = master_state_dict(model, optimizer)
    assert told["masters"] == masters
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    if level == "O2":
        assert not torch.equal(weights["embed.weight"], model.embed.weight.float())
        for changed in (model.embed.weight.detach().float(), torch.zeros(3).bfloat16()):
            copy = {**both, "model": {**both["model"], "embed.weight": changed}}
            torch.save(copy, tmp_path / "run.pt")
            message = refused_in_a_line(capsys, "convert", tmp_path / "run.pt", "--to", "bf16")
            assert "holds bits of a weight 'embed.weight'" in message
        del both["optimizer"]["fp8stack"]["names"]
        torch.save(both, tmp_path / "run.pt")
        message = refused_in_a_line(capsys, "convert", tmp_path / "run.pt", "--to", "bf16")
        assert "holds bits of a weight '" in message
        assert not (tmp_path / "run_bf16.pt").exists()


def test_convert_rounds_masters_once_to_bf16(saved, tmp_path, capsys):
    folder, masters = saved
    converted(capsys, folder / "4bit.pt", "bf16", tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert torch.equal(weights["inner.weight"], masters["4bit"]["inner.weight"].bfloat16())
    assert weights["inner.bias"].dtype is torch.bfloat16


def test_convert_writes_safetensors_with_the_tie(saved, tmp_path, capsys):
    folder, masters = saved
    out = tmp_path / "model.safetensors"
    converted(capsys, folder / "O2.pt", "safetensors", out)
    assert not {"embed.weight", "head.weight"} <= load_file(out).keys()
    model = Tied()
    assert load_model(model, out) == (set(), [])
    assert torch.equal(model.head.weight, masters["O2"]["head.weight"])
    half = tmp_path / "half.safetensors"
    converted(capsys, folder / "O2.pt", "bf16", half)
    assert load_file(half)["inner.bias"].dtype is torch.bfloat16


def test_views_of_one_storage_are_two_tensors(tmp_path, capsys):
    whole = torch.randn(100)
    model = {"a": whole[:50], "b": whole[25:75]}
    torch.save({"model": model, "optimizer": None}, tmp_path / "x.pt")
    assert inspected(capsys, tmp_path / "x.pt")["elements"] == 100
    converted(capsys, tmp_path / "x.pt", "safetensors", tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["b"], whole[25:75])


def test_the_default_name_is_beside_the_checkpoint(saved, tmp_path, capsys):
    shutil.copy(saved[0] / "O2.pt", tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), "--to", "fp32"]) == 0
    assert "5 tensors in float32, 42.47 KiB; 2 of them from masters" in capsys.readouterr().out
    assert (tmp_path / "run_fp32.pt").is_file()
    shutil.copytree(saved[0] / "dcp", tmp_path / "step_2")
    (tmp_path / "latest").symlink_to("step_2")  # which will be another step
    assert main(["convert", str(tmp_path / "latest"), "--to", "safetensors"]) == 0
    assert (tmp_path / "step_2.safetensors").is_file()


# --- what is refused


@pytest.mark.parametrize(
    "contents",
    [
        [1], {"a": torch.zeros(2)}, {"model": {}, "epoch": 3}, {"model": 3, "optimizer": None},
        {"model": {}, "optimizer": [{"state": {}}]}, {"model": {}, "optimizer": {"state": {0: 3}}},
        {"model": {}, "optimizer": {}, "extra": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_model_with_its_optimizer_is_refused(contents, tmp_path, capsys):
    torch.save(contents, tmp_path / "run.pt")
    message = refused_in_a_line(capsys, "convert", tmp_path / "run.pt", "--to", "fp32")
    assert "run.pt is no checkpoint of a model and its optimizer" in message
    assert "torch.load(weights_only=True) or safetensors.safe_open" in message


def test_damaged_checkpoints_are_named(saved, tmp_path, capsys):
    (tmp_path / "half.pt").write_bytes((saved[0] / "O2.pt").read_bytes()[:4000])
    message = refused_in_a_line(capsys, "inspect", tmp_path / "half.pt")
    assert "half.pt cannot be read: it is truncated" in message
    torch.save(Tied(), tmp_path / "model.pt")
    message = refused_in_a_line(capsys, "inspect", tmp_path / "model.pt")
    assert re.search(r"it holds a \S*Tied", message)
    assert f"{tmp_path} cannot be read as" in refused_in_a_line(capsys, "inspect", tmp_path)
    shutil.copytree(saved[0] / "dcp", tmp_path / "dcp")
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    for path, contents in (
        (shard, shard.read_bytes()[:-1000]),
        (tmp_path / "dcp" / ".metadata", b"\x80"),
    ):
        path.write_bytes(contents)
        assert "dcp cannot be read as" in refused_in_a_line(capsys, "inspect", tmp_path / "dcp")


def test_files_that_are_no_checkpoints_are_a_line(tmp_path):
    """Whatever the unpickler makes of their bytes: half of them start as a pickle or an archive does."""
    path, chance = tmp_path / "x.pt", random.Random(0)
    starts = (b"", b"\x80\x02", b"PK\x03\x04", b"\x80\x02}q\x00(X")
    texts = [starts[i % 4] + chance.randbytes(chance.randrange(1, 300)) for i in range(300)]
    for text in (b"hello\n", b"", b"{}", *texts):
        path.write_bytes(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_file(path)


def test_what_is_there_stays_where_nothing_can_be_written(saved, tmp_path, capsys):
    source = tmp_path / "O2.pt"
    shutil.copy(saved[0] / "O2.pt", source)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    options = ("convert", source, "--to", "fp32", "--out")
    for out in ("file/w.pt", "none/w.pt", "O2.pt", ".", "pipe"):
        told = "must be a file in a folder that is there, and not the checkpoint itself"
        assert told in refused_in_a_line(capsys, *options, tmp_path / out)
    assert "/proc/w.pt cannot be written" in refused_in_a_line(capsys, *options, "/proc/w.pt")
    safe = ("convert", source, "--to", "safetensors", "--out", tmp_path / "w.pt")
    assert "its name must end in .safetensors" in refused_in_a_line(capsys, *safe)
    long = tmp_path / ("x" * 300)  # a refusal of the system that no user escapes by being root
    told = f"{long} cannot be used: File name too long."
    assert told in refused_in_a_line(capsys, "inspect", long)
    assert "invalid choice: 'fp16'" in refused_in_a_line(capsys, "convert", source, "--to", "fp16")
    assert source.read_bytes() == (saved[0] / "O2.pt").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["O2.pt", "file", "pipe"]


@pytest.mark.parametrize("to", ["fp32", "safetensors"])
def test_a_disk_without_room_is_named_in_one_line(to, saved, tmp_path, capsys):
    out = tmp_path / ("w.safetensors" if to == "safetensors" else "w.pt")
    # Python ignores the signal that comes with it
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        line = refused_in_a_line(capsys, "convert", saved[0] / "O2.pt", "--to", to, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    line = line.rstrip()
    assert line.startswith(f"fp8stack convert: error: {out} cannot be written: ")
    assert "File too large" in line
    assert line.endswith("Nothing is left of it.")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_without_a_traceback(monkeypatch, saved, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8stack.cli.inspect.read", interrupted)
    assert main(["inspect", str(saved[0] / "O2.pt")]) == 130
    assert capsys.readouterr() == ("", "")
