"""Files that cannot be read or be read as a whole, datasets of several parts, and validation of other sizes."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import corpus
import pytest
from gpt import changes, hub
from gpt.config import Config
from gpt.data import open_data

from fp8stack.errors import ConfigError, Fp8StackWarning

SEQ = 16


def deny(monkeypatch, method, part):
    """Let a method of Path raise for paths that hold `part`, as it does for who may not enter a folder."""
    real = getattr(Path, method)

    def denied(self, *args, **kwargs):
        if part in str(self):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, method, denied)


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_name_that_is_too_long_is_one_line(prefix):
    with pytest.raises(ConfigError, match=r"--data x+: cannot be read: File name too long"):
        open_data(Config(data=prefix + "x" * 300, seq_len=SEQ))


@pytest.mark.parametrize("method", ["is_dir", "exists"])
def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path, monkeypatch, method):
    deny(monkeypatch, method, "closed")
    with pytest.raises(ConfigError, match=r"closed/x.txt: cannot be read: Permission denied\. "):
        open_data(Config(data=str(tmp_path / "closed" / "x.txt"), seq_len=SEQ))


@pytest.mark.parametrize("name", ["x.bin", "meta.json"])
def test_a_folder_in_the_place_of_a_file_of_shards_is_named(tmp_path, name):
    for file in ("train.bin", "val.bin"):
        (tmp_path / file).write_bytes(b"ab" * 80)
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name}: cannot be read: Is a directory"):
        open_data(Config(data=str(tmp_path), seq_len=SEQ))


@pytest.mark.parametrize("content", [b'{"encod', b"\xff\xfe", b""])
def test_a_damaged_meta_json_says_what_it_must_hold(tmp_path, content):
    for file, text in (("train.bin", b"ab"), ("val.bin", b"ab"), ("meta.json", content)):
        (tmp_path / file).write_bytes(text)
    with pytest.raises(ConfigError, match=r"meta\.json: must name the encoding of the shards"):
        open_data(Config(data=str(tmp_path), seq_len=SEQ))


def test_a_text_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a" * 500)

    def refuse(path, *args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(corpus, "open", refuse, raising=False)
    with pytest.raises(ConfigError, match=r"^--data .*a.txt: cannot be read: Permission denied\."):
        open_data(Config(data=str(tmp_path), seq_len=SEQ))


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


def test_text_that_is_not_read_as_a_whole_is_said_once(tmp_path):
    book = tmp_path / "book.txt"
    book.write_bytes(b"a line\n" * (5 * 2**20))
    with pytest.warns(
        Fp8StackWarning, match=r"book.txt: read 32 MiB of text, of 35 MiB of files; .*all"
    ) as told:
        open_data(Config(data=str(book), seq_len=SEQ))
    assert len(told) == 1


def test_text_that_is_read_as_a_whole_is_not_said(tmp_path, recwarn):
    (tmp_path / "book.txt").write_bytes(b"a line\n" * 100)
    open_data(Config(data=str(tmp_path), seq_len=SEQ))
    open_data(Config())
    assert not recwarn


def test_a_dataset_of_several_configurations_asks_for_one(tmp_path):
    pytest.importorskip("datasets")
    configs = [f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("en", "de")]
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    for name in ("en", "de"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    expected = f"has several configurations: en, de. Choose one, .*--data hf:{tmp_path}:en"
    with pytest.raises(ConfigError, match=expected):
        hub.open_documents(f"hf:{tmp_path}")
    documents, _ = hub.open_documents(f"hf:{tmp_path}:de")
    assert list(documents(0)) == ["de"]


def test_a_folder_of_documents_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    assert hub._arguments("hf:~/texts")["data_files"] == {"train": [str(tmp_path / "texts/a.txt")]}


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
