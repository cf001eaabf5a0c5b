"""Files that cannot be read or be read as a whole, datasets of several parts, and validation of other sizes."""

import errno
import os
from dataclasses import replace

import corpus
import pytest
from gpt import changes
from gpt.config import Config
from gpt.data import open_data

from fp8stack.errors import ConfigError

SEQ = 16


@pytest.mark.parametrize("inside", ["", "closed"])
def test_a_folder_that_may_not_be_read_is_named_not_left_out(tmp_path, monkeypatch, inside):
    (tmp_path / "a.txt").write_text("a" * 500)
    closed = tmp_path / inside
    closed.mkdir(exist_ok=True)
    real = os.scandir

    def refuse(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=rf"^--data {closed}: cannot be read: Permission denied"):
        open_data(Config(data=str(tmp_path), seq_len=SEQ))


def test_files_that_may_not_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a" * 500)

    def refuse(path, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for where, name in ((corpus, "open"), (type(tmp_path), "is_dir"), (type(tmp_path), "exists")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, refuse, raising=False)
            with pytest.raises(ConfigError, match=r"a.txt: cannot be read: Permission denied\."):
                open_data(Config(data=str(tmp_path / "a.txt"), seq_len=SEQ))


# --- validation of another size


@pytest.fixture
def streamed(tmp_path):
    """Documents without a split for validation: the first ones are set aside."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": [f"{index:040d}" for index in range(60)]})
    parquet.write_table(table, tmp_path / "x.parquet")
    return Config(
        data=str(tmp_path), encoding="bytes", seq_len=SEQ, eval_batches=4, eval_batch_size=2
    )


def test_a_resumed_stream_does_not_validate_with_what_it_has_trained_on(streamed):
    state = open_data(streamed).train.state_dict()
    for options in ({"eval_batches": 40}, {"eval_batch_size": 9}, {"seq_len": 64}):
        larger = open_data(replace(streamed, **options)).train
        with pytest.raises(ConfigError, match=r"trained on all after the first 4\. Go on with the"):
            larger.load_state_dict(state)


def test_a_resumed_stream_keeps_out_what_was_set_aside(streamed):
    state = open_data(streamed).train.state_dict()
    smaller = open_data(replace(streamed, eval_batches=1)).train
    smaller.load_state_dict(state)
    while smaller.epoch == 0:
        smaller.next_batch(1)
    assert smaller.skipped == 4
    assert smaller.read == 5  # the first of the new epoch, after those
    assert smaller.state_dict()["skipped"] == 4


def test_a_position_of_before_that_was_written_is_taken(streamed):
    train = open_data(streamed).train
    train.next_batch(2)
    state = train.state_dict()
    del state["skipped"]
    again = open_data(streamed).train
    again.load_state_dict(state)
    assert (again.read, again.left) == (train.read, train.left)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eval_batches": 8}, ["--eval-batches was 4, is now 8"]),
        ({"eval_batch_size": 8}, ["--eval-batch-size was 2, is now 8"]),
        ({"eval_batches": 2, "eval_batch_size": 4}, []),  # the same windows
    ],
)
def test_validation_of_other_windows_is_said_at_a_resume(streamed, recwarn, options, said):
    now, was = (
        changes.describe(config, open_data(config))
        for config in (replace(streamed, **options), streamed)
    )
    changes.report(was, now, strict=False)
    texts = [str(warning.message) for warning in recwarn]
    assert texts == [f"{line}: {changes.OTHER_SET}." for line in said]
    if said:
        with pytest.raises(ConfigError, match=said[0]):
            changes.report(was, now, strict=True)
    older = {name: value for name, value in was.items() if not name.startswith("eval")}
    assert changes.report(older, now, strict=True) == set()
