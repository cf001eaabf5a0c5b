"""Checkpoints on disk: complete or not there, whatever happens to files, folders and the disk."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from gpt import checkpoints
from gpt.checkpoints import CheckpointError, find, find_latest, inspect, list_checkpoints
from gpt.config import Config
from gpt.runs import find_checkpoint, list_runs
from workers_scripts import run_script

from fp8stack.errors import Fp8StackWarning

ROOT = Path(checkpoints.__file__).parents[2]
FULL = """
import resource, sys
from pathlib import Path
import torch
from gpt.checkpoints import CheckpointError, save

folder = Path(sys.argv[1])
def write(step, size):
    return save(folder, step, {"model": {"w": torch.full((size,), float(step))}}, {"step": step}, {}, {}, 3)
write(1, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
for step in (2, 3):  # and again: what is left of the first does not matter
    try:
        write(step, 2**20)
    except CheckpointError as error:
        print(error)
write(4, 10)
"""


def write(folder, step, val_loss=None, keep=3):
    states = {"model": {"w": torch.full((100,), float(step))}}
    facts = {"val_loss": val_loss, "precision": "FP8 O2", "train_loss": 3.0}
    local = {"random": torch.arange(step)}
    return checkpoints.save(folder, step, states, {"step": step}, local, facts, keep)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    path = write(tmp_path / "new" / "checkpoints", 250, 2.5)
    assert path.name == "step_00000250"
    found = find(tmp_path / "new" / "checkpoints")
    assert (found.path, found.step, found.val_loss) == (path, 250, 2.5)
    assert found.manifest["precision"] == "FP8 O2"
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    assert found.nbytes == sum(file.stat().st_size for file in files)
    states = {"model": {"w": torch.zeros(100)}}
    progress, local = checkpoints.load(path, states)
    assert progress == {"step": 250}
    assert local["random"].tolist() == list(range(250))
    assert states["model"]["w"].tolist() == [250.0] * 100
    for other in ({"w": torch.zeros(101)}, {"v": torch.zeros(100)}):
        with pytest.raises(CheckpointError, match="does not fit this run"):
            checkpoints.load(path, {"model": other})
    write(path.parent, 250)  # again, and not evaluated now
    assert not (path.parent / "best").is_symlink()


def test_the_last_ones_and_the_best_stay(tmp_path):
    losses = [3.0, 1.0, 2.0, float("nan"), None, 1.5]
    for step, loss in enumerate(losses, 1):
        write(tmp_path, step, loss, keep=2)
    assert names(tmp_path) == ["step_00000002", "step_00000005", "step_00000006"]
    assert os.readlink(tmp_path / "best") == "step_00000002"
    assert os.readlink(tmp_path / "latest") == "step_00000006"
    assert find(tmp_path / "best").step == 2
    write(tmp_path, 2)  # of a run that was taken back, and is not evaluated now
    assert os.readlink(tmp_path / "best") == "step_00000006"
    assert find_latest([tmp_path]).step == 2  # the last one written
    write(tmp_path, 7, 0.5, keep=2)
    assert names(tmp_path) == ["step_00000002", "step_00000007"]


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(b"{" if path.suffix == ".json" else content)


def unreadable(path):
    """A link to itself, which no user can read, not even root."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(truncate, "cut short"), (alter, "altered"), (Path.unlink, "missing"), (unreadable, "read")],
)
@pytest.mark.parametrize("file", ["__0_0.distcp", "progress.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_with_one_warning(tmp_path, file, damage, said):
    config = Config(model="tiny", run_name="mine", out=tmp_path, resume="auto")
    folder = tmp_path / "mine-fp8-o2" / "checkpoints_fp8"
    older, newer = (write(folder, step, 2.0) for step in (1, 2))
    damage(newer / file)
    expected = r"cannot be used; using step_00000001.*step_00000002"
    with pytest.warns(Fp8StackWarning, match=expected) as caught:
        assert find_checkpoint(config, "FP8 O2").path == older
    assert len(caught) == 1
    if file == "manifest.json" and damage is not unreadable:
        said = "it has no manifest.json" if damage is Path.unlink else "manifest.json is damaged"
    with pytest.raises(CheckpointError, match=f"step_00000002.*{said}"):
        inspect(newer)
    if damage is not alter or file == "manifest.json":  # sizes alone are listed
        assert f" damaged  {newer}: " in list_runs(config)
    shutil.rmtree(older)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, by the error
        with pytest.raises(CheckpointError, match=r"^no checkpoint is whole: .*step_00000002.* Do"):
            find_latest([folder], "Do it.")


def test_what_a_killed_process_left_is_no_checkpoint_and_goes_away(tmp_path):
    path = write(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".writing-step_00000002")
    shutil.copytree(path, tmp_path / ".deleting-step_00000000")
    (tmp_path / ".deleting-step_00000001_fp32.pt").write_bytes(b"weights")  # a file's too
    (tmp_path / "latest").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_latest([tmp_path]).step == 1
    write(tmp_path, 3)
    assert names(tmp_path) == ["step_00000001", "step_00000003"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    script, folder = tmp_path / "full.py", tmp_path / "checkpoints"
    script.write_text(FULL)
    said = run_script([str(script), str(folder)], tmp_path / "said", 0)
    assert said.count("no checkpoint could be written") == 2
    assert said.count("File too large") == 2
    assert names(folder) == ["step_00000001", "step_00000004"]
    assert [inspect(c.path).step for c in list_checkpoints([folder])] == [1, 4]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    expected = r"no checkpoint could be written.*another --out and the path of one"
    with pytest.raises(CheckpointError, match=expected):
        write(tmp_path / "file" / "checkpoints", 1)
    write(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "step_00000002").write_text("in the way")  # and so replaced
    path = write(tmp_path / "checkpoints", 2)
    assert names(tmp_path / "checkpoints") == ["step_00000001", "step_00000002"]
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(CheckpointError, match="of format 9, this program reads 1"):
        find(path)
