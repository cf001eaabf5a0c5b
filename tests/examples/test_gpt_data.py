"""What a run reads: the same samples in the same order from any source, however many ranks and micro-batches."""

import errno
import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpt import hub, tokenize_data, windows
from gpt.config import Config
from gpt.data import open_data
from workers_gpt import write_parquet

from fp8stack.errors import ConfigError

SEQ = 16
SOURCES = ("text", "shards", "parquet", "documents")


def sentence(index):
    letters = random.Random(index)
    return f"[{index}] " + "".join(letters.choices("abcdefghij klmnop", k=20 + index % 50))


def settings_of(data, **options):
    return Config(**{"data": str(data), "encoding": "bytes", "seq_len": SEQ, **options})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same kind of text as each source."""
    root = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        (root / name).mkdir()
    texts = [sentence(index) for index in range(120)]
    (root / "text" / "book.txt").write_text("\n".join(texts))
    for file, part in (("a", texts[:70]), ("b", texts[70:])):
        write_parquet(root / "parquet" / f"{file}.parquet", id=list(range(len(part))), text=part)
        (root / "documents" / f"{file}.txt").write_text("\n".join(part))
    (root / "documents" / "valid.txt").write_text("\n".join(map(sentence, range(200, 260))))
    given = ["--data", str(root / "parquet"), "--encoding", "bytes", "--shard-tokens", "1000"]
    given += ["--shards", str(root / "shards"), "--val-tokens", "900"]
    assert tokenize_data.main(given) == 0
    return root


@pytest.fixture
def settings(folders, request):
    name = request.param
    data = f"hf:{folders / name}" if name == "documents" else folders / name
    kind = "auto" if name == "shards" else "bytes"
    return settings_of(data, encoding=kind, eval_batches=3, eval_batch_size=4)


def take(settings, size, steps, world=1, state=None):
    """Return the tokens and targets of `steps` micro-steps of all ranks, in global order, and the last state."""
    ranks = [open_data(settings, rank, world).train for rank in range(world)]
    rows = []
    for train in ranks:
        if state is not None:
            train.load_state_dict(json.loads(json.dumps(state)))
    for _ in range(steps):
        rows += [torch.stack(train.next_batch(size), 1) for train in ranks]
    states = [train.state_dict() for train in ranks]
    assert all(other == states[0] for other in states)
    return torch.cat(rows), states[0]


@pytest.mark.parametrize("settings", SOURCES, indirect=True)
def test_samples_and_positions_do_not_depend_on_ranks_and_micro_batches(settings):
    expected, _ = take(settings, size=12, steps=40)
    assert expected.shape == (480, 2, SEQ)
    assert expected.dtype == torch.int64
    assert torch.equal(expected[:, 0, 1:], expected[:, 1, :-1])  # targets follow tokens
    for size, steps, world in ((3, 160, 1), (2, 60, 4)):
        assert torch.equal(take(settings, size, steps, world)[0], expected)
    begun, state = take(settings, size=2, steps=50, world=2)
    rest, _ = take(settings, size=5, steps=56, world=1, state=state)
    assert torch.equal(torch.cat([begun, rest]), expected)


@pytest.mark.parametrize("settings", SOURCES, indirect=True)
def test_validation_is_the_same_each_time_and_not_trained_on(settings):
    data, again = open_data(settings), open_data(settings)
    assert [batch[0].shape for batch in data.validation] == [(4, SEQ)] * 3
    for batch, other in zip(data.validation, again.validation, strict=True):
        assert torch.equal(batch[0], other[0])
        assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    rows = []
    while data.train.epoch == 0:
        rows.append(data.decode(data.train.next_batch(1)[0][0]))
    assert len(rows) * SEQ > 2000
    text = "".join(rows) if settings.data.endswith(("parquet", "documents")) else "\n".join(rows)
    assert all(data.decode(row) not in text for batch in data.validation for row in batch[0])


@pytest.mark.parametrize("settings", ["text", "shards"], indirect=True)
def test_windows_come_once_an_epoch_in_an_order_of_seed_and_epoch(settings):
    train = open_data(settings).train
    count = int(train.ends[-1])
    first, second = train.next_batch(count)[0], train.next_batch(count)[0]
    assert train.epoch == 2
    assert not torch.equal(first, second)
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist()))
    other = open_data(replace(settings, seed=1)).train.next_batch(count)[0]
    assert not torch.equal(first, other)


@pytest.mark.parametrize("settings", ["parquet"], indirect=True)
def test_documents_are_joined_with_separators_after_those_of_validation(settings, folders):
    data = open_data(settings)
    skipped = data.train.skipped
    assert skipped > 0
    expected = "".join(sentence(index) + "\n\n" for index in range(skipped, 120))
    assert data.decode(data.train.next_batch(20)[0].flatten()) == expected[: 20 * SEQ]
    held_out = torch.cat([batch[0] for batch in data.validation]).flatten()
    assert data.decode(held_out[:SEQ]) == sentence(0)[:SEQ]
    _, train, held_out = windows.open_shards(folders / "shards")  # written of the same documents
    text = b"".join(part.tobytes() for part in train).decode()
    first = int(text[1 : text.index("]")])
    assert text == "".join(sentence(index) + "\n\n" for index in range(first, 120))
    assert {len(part) for part in train[:-1]} == {1000}
    assert sum(map(len, held_out)) == 900


def test_the_header_of_llm_c_s_shards_is_skipped(tmp_path):
    header = np.zeros(256, np.int32)
    header[:2] = windows.MAGIC, 1
    for name in ("fw_train_0", "fw_val_0"):
        tokens = np.arange(50_000, 50_100, dtype=np.uint16)
        (tmp_path / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    encoding, train, _ = windows.open_shards(tmp_path)
    assert (encoding.name, train[0].tolist()) == ("gpt2", list(range(50_000, 50_100)))


def test_the_default_is_the_standard_library():
    data = open_data(Config())
    assert "standard library" in data.name
    assert data.vocab_size == 320
    assert data.train.next_batch(2)[0].shape == (2, 256)
    assert data.decode(data.encode("größe")) == "größe"
    assert data.decode(torch.tensor([104, 105, 256, 319])) == "hi"


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a.txt": b"short"}, {}, "must be longer than a window"),
        ({}, {}, "holds no text"),
        ({}, {"text_column": "a"}, r"has no columns\. Leave it out"),
        ({}, {"data": "hf:../.."}, r"--data hf:../..: names no dataset"),  # not the current folder
        ({"a.bin": b"ab"}, {}, 'for validation; one of each .* "val" in their names'),
        ({"a.bin": b"abc", "val.bin": b"ab"}, {}, "a.bin: 3 bytes are no uint16 tokens"),
        ({"a.bin": b"abab", "val.bin": b"ab"}, {}, "2 tokens for training are no window of 16"),
        ({"a.bin": b"\xff" * 80, "val.bin": b"ab" * 80, "meta.json": b'{"encoding": "gpt2"}'}, {},
         "token 65535, and its encoding has 50304"),
        ({"a.bin": b"a", "val.bin": b"a", "meta.json": b'{"encoding": "gpt5"}'}, {}, "meta.json: must name"),
        ({"a.bin": b"a", "val.bin": b"a", "meta.json": b'{"encoding": "bytes"}'}, {"encoding": "gpt2"},
         "are of bytes. Leave it out"),
        ({"a.parquet": b"PAR1"}, {"encoding": "bytes"}, "cannot be opened"),
        ({"a.bin": b"ab" * 80, "val.bin": b"ab" * 80, "x.bin/y": b""}, {}, "x.bin: cannot be read: Is a directory"),
    ],
)  # fmt: skip
def test_bad_sources_are_refused_with_a_remedy(tmp_path, files, options, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_data(
            settings_of(**{"data": tmp_path, "encoding": "auto", **options})
        ).train.next_batch(1)


BOTH = {"a": ["ax" * SEQ] * 9, "body": ["by" * SEQ] * 9, "n": [1] * 9}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (BOTH, {}, 'no column named "text", but several others that are text: a, body. .*text-column a'),
        ({"id": [1], "when": [0.5]}, {}, r"no column of text, only id \(int\), when \(float\)"),
        (BOTH, {"text_column": "bdy"}, '--text-column bdy: is not there. Did you mean "body".*a, body, n'),
        ({"prose": ["x", "y"]}, {}, "all its 2 documents are fewer than"),
    ],
)  # fmt: skip
def test_columns_that_are_no_documents_are_refused(tmp_path, columns, options, message):
    write_parquet(tmp_path / "x.parquet", **columns)
    with pytest.raises(ConfigError, match=message):
        open_data(settings_of(tmp_path, **options))


def test_a_column_is_chosen_and_rows_without_text_are_empty_documents(tmp_path):
    write_parquet(tmp_path / "x.parquet", **BOTH, text=[None, "tt", *[None] * 7])
    few = {"eval_batches": 1, "eval_batch_size": 1}
    data = open_data(settings_of(tmp_path, text_column="body", **few))
    assert data.decode(data.train.next_batch(1)[0][0]).startswith("b")
    assert data.identity.endswith("(documents in body)")
    assert data.nbytes == (tmp_path / "x.parquet").stat().st_size
    documents, _ = hub.open_documents(str(tmp_path))
    assert list(documents(0)) == ["", "tt", *[""] * 7]


def test_a_position_of_another_kind_of_source_is_refused(folders):
    arrays, stream = (
        open_data(settings_of(folders / name, eval_batches=2)).train for name in ("text", "parquet")
    )
    for one, other in ((arrays, stream), (stream, arrays)):
        with pytest.raises(ConfigError, match="resume with the --data"):
            one.load_state_dict(other.state_dict())


def test_a_folder_that_may_not_be_read_is_named_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a" * 500)
    (tmp_path / "closed").mkdir()
    scan, said = os.scandir, os.strerror(errno.EACCES)

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, said, str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=rf"^--data {tmp_path}/closed: cannot be read: {said}"):
        open_data(settings_of(tmp_path))


# --- validation of another size


@pytest.fixture
def streamed(tmp_path):
    """Documents without a split for validation: the first ones are set aside."""
    write_parquet(tmp_path / "x.parquet", text=[f"{index:040d}" for index in range(60)])
    return settings_of(tmp_path, eval_batches=4, eval_batch_size=2)


def test_a_resumed_stream_keeps_out_what_was_set_aside_and_takes_no_more(streamed):
    state = open_data(streamed).train.state_dict()
    for options in ({"eval_batches": 40}, {"eval_batch_size": 9}, {"seq_len": 64}):
        larger = open_data(replace(streamed, **options)).train
        with pytest.raises(ConfigError, match=r"trained on all after the first 4\. Go on with the"):
            larger.load_state_dict(state)
    smaller = open_data(replace(streamed, eval_batches=1)).train
    smaller.load_state_dict(state)
    while smaller.epoch == 0:
        smaller.next_batch(1)
    assert smaller.skipped == 4
    assert smaller.read == 5  # the first of the new epoch, after those
    assert smaller.state_dict()["skipped"] == 4
