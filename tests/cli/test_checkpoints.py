"""`fp8stack inspect` and `fp8stack convert`, on checkpoints of every kind and level, whole and damaged."""

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_folder

import fp8stack
from fp8stack.__main__ import main
from fp8stack.checkpoint import master_state_dict, read_file
from fp8stack.errors import CheckpointError

LIMITED = """
import resource, signal, sys
import fp8stack.__main__, safetensors.torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
sys.exit(fp8stack.__main__.main(sys.argv[1:]))
"""
NUMEL = 96 * 64 + 64 * 64 + 64  # the tie once


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
    variants = {"plain": (None, {}), "O0": ("O0", {}), "O1": ("O1", {}), "O2": ("O2", {})}
    variants["4bit"] = ("O2", {"states": "4bit", "master": "split32"})
    variants["fp8-lm"] = ("O2", {"preset": "fp8-lm"})
    for name, (level, overrides) in variants.items():
        model, optimizer = make(level, **overrides)
        fp8stack.checkpoint.save(folder / f"{name}.pt", model, optimizer, step=250, loss=3.5)
        masters[name] = master_state_dict(model, optimizer)
        if name == "O2":
            states = dict(
                zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this is one process
                save_folder({**states, "epoch": 3}, checkpoint_id=folder / "dcp", no_dist=True)
            masters["dcp"] = masters[name]
    return folder, masters


def inspected(capsys, path):
    assert main(["inspect", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def converted(capsys, path, to, out):
    assert main(["convert", str(path), "--to", to, "--out", str(out), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "level", "moments", "masters"),
    [
        ("plain", None, {"float32": 3}, {}),
        ("O0", None, {"float32": 3}, {}),
        ("O1", "O1", {"float32": 3}, {}),
        ("O2", "O2", {"8-bit block 128": 2, "float32": 1}, {"remainder": {"int8": 2}}),
        ("4bit", "O2", {"4-bit block 128": 2, "float32": 1}, {"remainder": {"int16": 2}}),
        ("fp8-lm", "O2", {"float16, one scale": 2, "float32": 1}, {"master": {"float16, one scale": 2}}),
    ],
)  # fmt: skip
def test_inspect_reads_level_step_and_formats(name, level, moments, masters, saved, capsys):
    data = inspected(capsys, saved[0] / f"{name}.pt")
    assert (data["kind"], data["level"], data["step"]) == ("fp8stack.checkpoint", level, 250)
    assert data["extra"] == {"step": 250, "loss": 3.5}
    formats = {key: row["formats"] for key, row in data["optimizer"].items()}
    assert formats.pop("exp_avg_sq") == moments
    assert formats.pop("exp_avg")
    assert formats == masters
    stored = "bfloat16" if masters else "float32"
    assert data["model"][stored]["elements"] >= NUMEL - 64
    assert data["elements"] == NUMEL + 3  # and the buffer
    assert data["file_bytes"] == (saved[0] / f"{name}.pt").stat().st_size
    sizes = [t["bytes"] for t in data["largest"]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("level", "precision"), [("O1", "FP8 O1"), ("O2", "bf16 8bit")])
def test_inspect_says_what_the_application_s_manifest_does(
    level, precision, saved, tmp_path, capsys
):
    folder = tmp_path / "step_00000007"
    shutil.copytree(saved[0] / "dcp", folder)
    manifest = {"step": 7, "level": level, "precision": precision, "val_loss": 2.5, "files": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    data = inspected(capsys, folder)
    assert (data["step"], data["level"]) == (7, level)
    assert (data["extra"]["precision"], data["extra"]["val_loss"]) == (precision, 2.5)
    assert main(["inspect", str(folder)]) == 0
    assert f", step 7, {precision}\n" in capsys.readouterr().out
    for other in ("{", "[1]", '{"level": 3}'):  # some other program's
        (folder / "manifest.json").write_text(other)
        data = inspected(capsys, folder)
        assert (data["level"], data["precision"], "val_loss" in data["extra"]) == (
            "O2",
            None,
            False,
        )


def test_what_a_user_calls_a_level_is_not_taken_for_one(saved, tmp_path, capsys):
    contents = read_file(saved[0] / "O2.pt")
    extra = {"level": 3, "precision": "bf16-mixed"}
    torch.save({**contents, "extra": extra}, tmp_path / "game.pt")
    data = inspected(capsys, tmp_path / "game.pt")
    assert (data["level"], data["precision"], data["extra"]) == ("O2", None, extra)


def test_inspect_reads_the_header_of_a_folder(saved, capsys):
    data = inspected(capsys, saved[0] / "dcp")
    assert data["kind"] == "torch.distributed.checkpoint"
    assert (data["level"], data["step"]) == ("O2", 3)
    assert data["optimizer"]["exp_avg"]["formats"] == {"8-bit block 128": 2, "float32": 1}
    assert data["elements"] == NUMEL + 3 + 96 * 64  # which holds the tie twice
    assert main(["inspect", str(saved[0] / "dcp")]) == 0
    text = capsys.readouterr().out
    assert "step 3, O2" in text
    assert "2 × 8-bit block 128, 1 × float32" in text


@pytest.mark.parametrize("name", ["plain", "O1", "O2", "4bit", "fp8-lm", "dcp"])
def test_convert_puts_masters_together(name, saved, tmp_path, capsys):
    """All the bits that training had, in float32; ties stay ties, integers stay integers."""
    folder, masters = saved
    source = folder / (name if name == "dcp" else f"{name}.pt")
    told = converted(capsys, source, "fp32", tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert weights.keys() == masters[name].keys()
    for key, value in masters[name].items():
        assert torch.equal(weights[key], value), key
        assert weights[key].dtype == value.dtype
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    assert told["masters"] == (0 if name in ("plain", "O1") else 2)
    Tied().load_state_dict(weights)
    assert inspected(capsys, tmp_path / "w.pt")["elements"] == NUMEL + 3


@pytest.mark.parametrize(
    ("model_key", "optimizer_key"),
    [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict"), ("state_dict", "optimizer")],
)  # fmt: skip
@pytest.mark.parametrize(("level", "masters"), [(None, 0), ("O1", 0), ("O2", 2)])
def test_two_state_dicts_of_torch_save_are_read(
    level, masters, model_key, optimizer_key, tmp_path, capsys
):
    """With the masters' bits, by the names that `initialize` leaves: groups are in another order than weights."""
    model, optimizer = make(level)
    both = {model_key: model.state_dict(), optimizer_key: optimizer.state_dict(), "epoch": 4}
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
            copy = {**both, model_key: {**both[model_key], "embed.weight": changed}}
            torch.save(copy, tmp_path / "run.pt")
            message = refused(capsys, "convert", tmp_path / "run.pt", "--to", "bf16")
            assert "bits of the weight 'embed.weight' that do not go with it" in message
        del both[optimizer_key]["fp8stack"]["names"]
        torch.save(both, tmp_path / "run.pt")
        message = refused(capsys, "convert", tmp_path / "run.pt", "--to", "bf16")
        assert "holds bits of the weight 'parameter 2'" in message


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"model": {}, "state_dict": {}, "optimizer": {}}, "is no state_dict of a model but a dict"),
        ({"model": {}, "epoch": 3}, "is no state_dict of a model but a dict with ['model', 'epoch']"),
        ({"model": 3, "optimizer": None}, "'model' and 'optimizer' are no state_dicts"),
        ({"model": {}, "optimizer": [{"state": {}}]}, "'model' and 'optimizer' are no state_dicts"),
        ({"model": {}, "optimizer": {"state": {0: 3}}}, "'model' and 'optimizer' are no state_dicts"),
        ({"model": {}, "optimizer": {}, "extra": 1}, "'model' and 'optimizer' are no state_dicts"),
    ],
    ids=str,
)  # fmt: skip
def test_dicts_that_may_be_anything_are_refused(contents, message, tmp_path, capsys):
    torch.save(contents, tmp_path / "run.pt")
    assert message in refused(capsys, "convert", tmp_path / "run.pt", "--to", "fp32")


def test_files_that_are_no_checkpoints_are_a_line(tmp_path, capsys):
    """Whatever the unpickler makes of their bytes: half of them start as a pickle or an archive does."""
    path, chance = tmp_path / "x.pt", random.Random(0)
    starts = (b"", b"\x80\x02", b"PK\x03\x04", b"\x80\x02}q\x00(X")
    texts = [starts[i % 4] + chance.randbytes(chance.randrange(1, 300)) for i in range(300)]
    raised = set()
    for text in (b"hello\n", b"", b"{}", *texts):
        path.write_bytes(text)
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            read_file(path)
        raised.add(type(caught.value.__cause__))
    assert len(raised) > 4  # the unpickler's errors are of many kinds
    path.write_bytes(b"hello\n")
    assert "x.pt cannot be read" in refused(capsys, "inspect", path)


@pytest.fixture
def nobody():
    """Be somebody who may not read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
def test_files_of_others_are_named(name, tmp_path, capsys, request):
    (tmp_path / "x").mkdir()
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors", tmp_path / "x" / ".metadata"):
        path.write_text("")
    (tmp_path / name).chmod(0)
    request.getfixturevalue("nobody")
    message = refused(capsys, "inspect", tmp_path / name)
    assert f"{tmp_path / name}" in message
    assert "Permission denied. Change who may use it" in message


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
    data = inspected(capsys, out)
    assert (data["kind"], data["elements"], data["level"]) == ("safetensors", NUMEL + 3, None)
    assert "head.weight" not in data["extra"]
    converted(capsys, out, "fp32", tmp_path / "whole.pt")
    Tied().load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    converted(capsys, out, "bf16", tmp_path / "half.safetensors")  # and from it
    assert load_model(Tied(), tmp_path / "half.safetensors") == (set(), [])
    assert load_file(tmp_path / "half.safetensors")["inner.bias"].dtype is torch.bfloat16


def test_a_folder_s_ties_are_matrices_of_the_same_bits(tmp_path, capsys):
    """Also without states; norms of ones that are alike by chance stay apart, with their own values."""
    torch.manual_seed(0)
    norms = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64))
    model = nn.ModuleDict({"tied": Tied(), "norms": norms}).bfloat16()
    model["norms"][1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", states="8bit")
    for _ in range(3):
        sum((p * torch.randn(p.shape)).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(norms[1].weight, norms[3].weight), "bfloat16 does not show so small steps"
    named = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folders = {"named": named, "weights": {"model": named["model"]}, "plain": plain}
    for name, states in folders.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            save_folder(states, checkpoint_id=tmp_path / name, no_dist=True)
    expected = {"named": master_state_dict(model, optimizer), "weights": model.state_dict()}
    for name, weights in expected.items():
        converted(capsys, tmp_path / name, "safetensors", tmp_path / f"{name}.safetensors")
        held = load_file(tmp_path / f"{name}.safetensors")
        assert expected[name].keys() - held.keys() in ({"tied.head.weight"}, {"tied.embed.weight"})
        assert all(torch.equal(value, weights[key].to(value.dtype)) for key, value in held.items())
    message = refused(capsys, "convert", tmp_path / "plain", "--to", "fp32")
    assert "have the numbers of parameters and not their names" in message


def test_a_folder_without_names_tells_states_of_4_bits(tmp_path, capsys):
    model = nn.Linear(256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", states="4bit", compute="bf16")
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        save_folder(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            checkpoint_id=tmp_path,
            no_dist=True,
        )
    formats = {k: row["formats"] for k, row in inspected(capsys, tmp_path)["optimizer"].items()}
    assert formats["exp_avg"] == {"8-bit block 128": 1, "float32": 1}
    assert formats["exp_avg_sq"] == {"4-bit block 128": 1, "float32": 1}


def test_tensors_of_other_layouts_are_read(tmp_path, capsys):
    whole = torch.randn(100)
    torch.save(
        {"a": whole[:50], "b": whole[25:75], "w": torch.eye(4).to_sparse()}, tmp_path / "x.pt"
    )
    assert inspected(capsys, tmp_path / "x.pt")["elements"] == 116
    converted(capsys, tmp_path / "x.pt", "fp32", tmp_path / "y.pt")
    told = refused(capsys, "convert", tmp_path / "x.pt", "--to", "safetensors")
    assert "cannot be written: 'w' is sparse, and safetensors are dense" in told
    torch.save({"a": whole[:50], "b": whole[25:75]}, tmp_path / "x.pt")
    converted(capsys, tmp_path / "x.pt", "safetensors", tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["b"], whole[25:75])


def test_a_folder_of_weights_is_told_from_a_broken_checkpoint(tmp_path, capsys):
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    assert "is a folder of weights; name a file, such as" in refused(capsys, "inspect", tmp_path)


def test_the_default_name_is_beside_the_checkpoint(saved, tmp_path, capsys):
    shutil.copy(saved[0] / "O2.pt", tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), "--to", "fp32"]) == 0
    assert "5 tensors in float32, 42.47 KiB; 2 of them from masters" in capsys.readouterr().out
    assert (tmp_path / "run_fp32.pt").is_file()
    shutil.copytree(saved[0] / "dcp", tmp_path / "step_2")
    (tmp_path / "latest").symlink_to("step_2")  # which will be another step
    assert main(["convert", str(tmp_path / "latest"), "--to", "safetensors"]) == 0
    assert (tmp_path / "step_2.safetensors").is_file()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.pt").symlink_to(tmp_path / "run.pt")  # as in caches of downloads
    assert main(["convert", str(tmp_path / "here" / "model.pt"), "--to", "fp32"]) == 0
    assert (tmp_path / "here" / "model_fp32.pt").is_file()


def test_masters_without_names_are_refused(saved, tmp_path, capsys):
    contents = torch.load(saved[0] / "O2.pt", weights_only=True)
    del contents["names"]  # as older versions saved it
    torch.save(contents, tmp_path / "old.pt")
    message = refused(capsys, "convert", tmp_path / "old.pt", "--to", "fp32")
    assert "holds bits of the weight 'parameter 2'" in message
    assert inspected(capsys, tmp_path / "old.pt")["level"] == "O2"
    assert not (tmp_path / "old_fp32.pt").exists()


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as raised:
        main(list(map(str, arguments)))
    assert raised.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    return error


def test_damaged_checkpoints_are_named(saved, tmp_path, capsys):
    folder = saved[0]
    half = (folder / "O2.pt").read_bytes()[:4000]
    (tmp_path / "half.pt").write_bytes(half)
    assert "half.pt cannot be read: it is truncated" in refused(
        capsys, "inspect", tmp_path / "half.pt"
    )
    converted(capsys, folder / "O2.pt", "safetensors", tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    for count, message in ((5, "cannot be read"), (100, "header would be"), (5000, "header says")):
        (tmp_path / "cut.safetensors").write_bytes(whole[:count])
        assert message in refused(capsys, "inspect", tmp_path / "cut.safetensors")
    assert "without .metadata" in refused(capsys, "inspect", tmp_path)
    shutil.copytree(folder / "dcp", tmp_path / "dcp")
    assert f"such as {tmp_path / 'dcp'}." in refused(capsys, "inspect", tmp_path)
    run = tmp_path / "run"
    shutil.copytree(folder / "dcp", run / "checkpoints" / ".writing-step_2")
    assert "without .metadata" in refused(capsys, "inspect", run)
    for name in ("latest", "step_2"):
        shutil.copytree(folder / "dcp", run / "checkpoints" / name)
    assert f"such as {run / 'checkpoints' / 'latest'}." in refused(capsys, "inspect", run)
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert f"{shard.name} is missing or truncated" in refused(capsys, "inspect", tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80")
    assert ".metadata cannot be read" in refused(capsys, "inspect", tmp_path / "dcp")
    assert "no checkpoint at" in refused(capsys, "inspect", tmp_path / "none.pt")
    torch.save([1], tmp_path / "list.pt")
    assert "was not written by" in refused(capsys, "convert", tmp_path / "list.pt", "--to", "fp32")
    for contents in ({}, {"epoch": 3}, {0: torch.zeros(2)}):
        torch.save(contents, tmp_path / "dict.pt")
        message = refused(capsys, "inspect", tmp_path / "dict.pt")
        assert f"but a dict with {[*contents]}" in message
    torch.save(Tied(), tmp_path / "model.pt")
    message = refused(capsys, "inspect", tmp_path / "model.pt")
    assert re.search(
        r"it holds a \S*test_checkpoints.Tied, where tensors and plain types are read", message
    )
    assert "weights_only" not in message  # torch's advice to unpickle it


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, "8 bytes for 16"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "negative dimension"),
        ({"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}, "torch has no F4"),
        ({"__metadata__": 3}, "cannot be read"),
        ({"a": 3}, "cannot be read"),
    ],
    ids=str,
)
def test_a_wrong_header_of_safetensors_is_a_line(header, message, tmp_path, capsys):
    text, path = json.dumps(header).encode(), tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    assert message in refused(capsys, "inspect", path)
    assert message in refused(capsys, "convert", path, "--to", "fp32")


def test_what_is_there_stays_where_nothing_can_be_written(saved, tmp_path, capsys):
    source = tmp_path / "O2.pt"
    shutil.copy(saved[0] / "O2.pt", source)
    (tmp_path / "file").write_text("")
    options = ("convert", source, "--to", "fp32", "--out")
    for folder in (tmp_path / "file", tmp_path / "none", tmp_path / "none" / "deeper"):
        told = f"--out {folder / 'w.pt'}: there is no folder {folder}. Make it"
        assert told in refused(capsys, *options, folder / "w.pt")
    assert "/proc/w.pt cannot be written" in refused(capsys, *options, "/proc/w.pt")
    assert "is the checkpoint itself" in refused(capsys, *options, source)
    assert "is a folder" in refused(capsys, *options, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "or a device" in refused(
        capsys, *options, tmp_path / "pipe"
    )  # which a rename would replace
    told = "pipe is neither a file nor a folder"
    assert told in refused(capsys, "inspect", tmp_path / "pipe")  # and does not wait for a writer
    long = tmp_path / ("x" * 300)  # a refusal of the system that no user escapes by being root
    told = f"{long} cannot be used: File name too long."
    assert told in refused(capsys, "inspect", long)
    (safe := list(options))[3] = "safetensors"
    assert f"Name it {tmp_path / 'w.safetensors'}" in refused(capsys, *safe, tmp_path / "w.pt")
    assert "--largest -1 must be" in refused(capsys, "inspect", source, "--largest", "-1")
    assert "invalid choice: 'fp16'" in refused(capsys, "convert", source, "--to", "fp16")
    assert source.read_bytes() == (saved[0] / "O2.pt").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["O2.pt", "file", "pipe"]


def test_a_link_stays_one_and_what_it_leads_to_is_replaced(saved, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w.pt").write_bytes(b"old")
    (tmp_path / "link.pt").symlink_to("elsewhere/w.pt")
    told = converted(capsys, saved[0] / "O2.pt", "bf16", tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert (tmp_path / "elsewhere" / "w.pt").stat().st_size == told["bytes"] > 3
    assert len(list(tmp_path.rglob("*"))) == 3


@pytest.mark.parametrize("to", ["fp32", "safetensors"])
def test_a_disk_without_room_is_named_in_one_line(to, saved, tmp_path):
    out = tmp_path / ("w.safetensors" if to == "safetensors" else "w.pt")
    command = [
        sys.executable,
        "-c",
        LIMITED,
        "convert",
        saved[0] / "O2.pt",
        "--to",
        to,
        "--out",
        out,
    ]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fp8stack convert: error: {out} cannot be written: ")
    assert "File too large" in line
    assert line.endswith("Nothing is left of it.")
    assert list(tmp_path.iterdir()) == []


def test_a_text_is_no_checkpoint_and_the_reason_has_a_kind(tmp_path, capsys):
    (tmp_path / "text.pt").write_text("hello there\n" * 9)
    assert re.search(
        r"not a checkpoint \(KeyError: ", refused(capsys, "inspect", tmp_path / "text.pt")
    )


def test_ctrl_c_ends_without_a_traceback(monkeypatch, saved, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8stack.cli.inspect.read", interrupted)
    assert main(["inspect", str(saved[0] / "O2.pt")]) == 130
    assert capsys.readouterr() == ("", "")
