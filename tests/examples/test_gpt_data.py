"""What a run reads: the same samples in the same order from any source, however many ranks and micro-batches."""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpt import hub, tokenize_data, windows
from gpt.config import Config
from gpt.data import open_data

from fp8stack.errors import ConfigError, Fp8StackWarning

SEQ = 16
SOURCES = ("text", "shards", "parquet", "documents")


def sentence(index):
    letters = random.Random(index)
    return f"[{index}] " + "".join(letters.choices("abcdefghij klmnop", k=20 + index % 50))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same kind of text as each source."""
    root = tmp_path_factory.mktemp("sources")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name in SOURCES:
        (root / name).mkdir()
    texts = [sentence(index) for index in range(120)]
    (root / "text" / "book.txt").write_text("\n".join(texts))
    for file, part in (("a", texts[:70]), ("b", texts[70:])):
        table = pyarrow.table({"id": list(range(len(part))), "text": part})
        parquet.write_table(table, root / "parquet" / f"{file}.parquet")
        (root / "documents" / f"{file}.txt").write_text("\n".join(part))
    (root / "documents" / "valid.txt").write_text("\n".join(map(sentence, range(200, 260))))
    given = [
        "--data",
        str(root / "parquet"),
        "--encoding",
        "bytes",
        "--shards",
        str(root / "shards"),
    ]
    assert tokenize_data.main([*given, "--shard-tokens", "1000", "--val-tokens", "900"]) == 0
    return root


@pytest.fixture
def settings(folders, request):
    name = request.param
    data = f"hf:{folders / name}" if name == "documents" else str(folders / name)
    kind = "auto" if name == "shards" else "bytes"
    return Config(
        data=data, encoding=kind, seq_len=SEQ, eval_batches=3, eval_batch_size=4, model="tiny"
    )


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
def test_samples_do_not_depend_on_ranks_and_micro_batches(settings):
    expected, _ = take(settings, size=12, steps=40)
    assert expected.shape == (480, 2, SEQ)
    assert expected.dtype == torch.int64
    assert torch.equal(expected[:, 0, 1:], expected[:, 1, :-1])  # targets follow tokens
    for size, steps, world in ((3, 160, 1), (6, 40, 2), (2, 60, 4)):
        assert torch.equal(take(settings, size, steps, world)[0], expected)


@pytest.mark.parametrize("settings", SOURCES, indirect=True)
def test_a_position_is_resumed_with_other_ranks_and_micro_batches(settings):
    expected, _ = take(settings, size=4, steps=150)
    begun, state = take(settings, size=2, steps=50, world=2)
    rest, _ = take(settings, size=5, steps=80, world=1, state=state)
    assert torch.equal(torch.cat([begun, rest]), expected)


@pytest.mark.parametrize("settings", SOURCES, indirect=True)
def test_validation_is_the_same_each_time_and_not_trained_on(settings):
    data, again = open_data(settings), open_data(settings)
    assert [batch[0].shape for batch in data.validation] == [(4, SEQ)] * 3
    for batch, other in zip(data.validation, again.validation, strict=True):
        assert torch.equal(batch[0], other[0])
        assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    if hasattr(data.train, "parts"):
        text = b"\n".join(part.tobytes() for part in data.train.parts).decode()
    else:
        rows = []
        while data.train.epoch == 0:
            rows.append(data.decode(data.train.next_batch(1)[0][0]))
        text = "".join(rows)
    assert len(text) > 2000
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
def test_documents_are_joined_with_separators_after_those_of_validation(settings):
    data = open_data(settings)
    skipped = data.train.skipped
    assert skipped > 0
    expected = "".join(sentence(index) + "\n\n" for index in range(skipped, 120))
    row = data.train.next_batch(20)[0].flatten()
    assert data.decode(row) == expected[: 20 * SEQ]
    held_out = torch.cat([batch[0] for batch in data.validation]).flatten()
    assert data.decode(held_out[:SEQ]) == sentence(0)[:SEQ]


def test_shards_hold_the_documents_and_llm_c_s_header_is_skipped(folders, tmp_path):
    _, train, held_out = windows.open_shards(folders / "shards")
    skipped = 0
    while len("".join(sentence(i) + "\n\n" for i in range(skipped))) < 900:
        skipped += 1
    text = "".join(sentence(index) + "\n\n" for index in range(skipped, 120))
    assert b"".join(part.tobytes() for part in train).decode() == text
    assert {len(part) for part in train[:-1]} == {1000}
    assert sum(map(len, held_out)) == 900
    header = np.zeros(256, np.int32)
    header[:2] = windows.MAGIC, 1
    for name in ("fw_train_0", "fw_val_0"):
        tokens = np.arange(50_000, 50_100, dtype=np.uint16)
        (tmp_path / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    encoding, train, _ = windows.open_shards(tmp_path)
    assert (encoding.name, train[0].tolist()) == ("gpt2", list(range(50_000, 50_100)))
    assert isinstance(train[0], np.memmap)


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
        ({"a.bin": b"ab"}, {}, 'for validation; one of each .* "val" in their names'),
        ({"a.bin": b"abc", "val.bin": b"ab"}, {}, "a.bin: 3 bytes are no uint16 tokens"),
        ({"a.bin": b"", "val.bin": b"ab"}, {}, "empty or truncated"),
        ({"a.bin": b"abab", "val.bin": b"ab"}, {}, "2 tokens for training are no window of 16"),
        ({"a.bin": b"\xff" * 80, "val.bin": b"ab" * 80, "meta.json": b'{"encoding": "gpt2"}'}, {},
         "token 65535, and its encoding has 50304"),
        ({"a.bin": b"a", "val.bin": b"a", "meta.json": b'{"encoding": "gpt5"}'}, {}, "meta.json: must name"),
        ({"a.bin": b"a", "val.bin": b"a", "meta.json": b'{"encoding": "bytes"}'}, {"encoding": "gpt2"},
         "are of bytes. Leave it out"),
        ({"a.parquet": b"PAR1"}, {"encoding": "bytes"}, "cannot be opened"),
        ({"a.bin": b"ab" * 80, "val.bin": b"ab" * 80, "x.bin/y": b""}, {}, "x.bin: cannot be read: Is a directory"),
        ({"a.bin": b"ab" * 80, "val.bin": b"ab" * 80, "meta.json/y": b""}, {}, "meta.json: cannot be read: Is a d"),
    ],
)  # fmt: skip
def test_bad_sources_are_refused_with_a_remedy(tmp_path, files, options, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_data(Config(data=str(tmp_path), seq_len=SEQ, **options)).train.next_batch(1)


def test_columns_of_a_dataset_are_named_and_chosen(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def opened(columns, **options):
        parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
        return open_data(Config(data=str(tmp_path), encoding="bytes", seq_len=SEQ, **options))

    few = {"eval_batches": 1, "eval_batch_size": 1}
    both = {"a": ["ax" * SEQ] * 9, "body": ["by" * SEQ] * 9, "n": [1] * 9}
    for columns, options, message in (
        (both, {}, 'no column named "text", but several others that are text: a, body. .*text-column a'),
        ({"id": [1], "when": [0.5]}, {}, r"no column of text, only id \(int\), when \(float\)"),
        (both, {"text_column": "bdy"}, '--text-column bdy: is not there. Did you mean "body".*a, body, n'),
        (both, {"text_column": "n"}, "--text-column n: is no text"),
        ({"prose": ["x", "y"]}, {}, "all its 2 documents are fewer than"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message) as told:
            opened(columns, **options)
        assert "huggingface.co" not in str(told.value)
    for column, letter in (("a", "a"), ("body", "b")):
        data = opened({**both, "text": ["tt"] * 9}, text_column=column, **few)
        assert data.decode(data.train.next_batch(1)[0][0]).startswith(letter)
        assert data.identity.endswith(f"(documents in {column})")
        assert data.nbytes == (tmp_path / "x.parquet").stat().st_size
    with pytest.raises(ConfigError, match="hf:nobody/nothing: has no rows"):
        hub._text_column("hf:nobody/nothing", {}, None)
    with pytest.raises(ConfigError, match=r"has no columns\. Leave it out"):
        open_data(Config(text_column="a"))


@pytest.mark.parametrize("first", [[], [None]])  # None says nothing of the column
def test_rows_without_text_are_empty_documents(tmp_path, first):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [*first, "ab" * SEQ, None, "cd" * SEQ]
    table = pyarrow.table({"id": [1] * len(rows), "text": rows})
    parquet.write_table(table, tmp_path / "x.parquet")
    documents, _ = hub.open_documents(str(tmp_path))
    assert list(documents(0)) == [row or "" for row in rows]


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py"),
        ValueError("The repository for a/b contains custom code which must be executed. Please"),
    ],
)
def test_a_dataset_with_a_script_is_read_from_the_hub_s_conversion(answer, monkeypatch):
    """As `datasets` answers from 4.0 on, and before; the Hub itself is not there."""
    datasets, asked = pytest.importorskip("datasets"), []

    def load(path, name, streaming, revision=None):
        asked.append((path, name, revision))
        if revision is None:
            raise answer
        rows = [{"text": f"document {i}"} for i in range(3)]
        return {"train": datasets.Dataset.from_list(rows).to_iterable_dataset()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.warns(Fp8StackWarning, match="comes with a script, which is not run"):
        documents, held_out = hub.open_documents("openwebtext")
    assert asked == [("Skylion007/openwebtext", None, r) for r in (None, "refs/convert/parquet")]
    assert held_out is None
    assert list(documents(1)) == ["document 1", "document 2"]


def test_documents_that_cannot_be_read_later_are_an_error_that_says_where(tmp_path):
    pytest.importorskip("datasets")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("a", "b"):
        rows = pa.table({"text": [f"{name} {i} " * 50 for i in range(40)]})
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:400])
    data = open_data(
        Config(data=str(tmp_path), encoding="bytes", seq_len=SEQ, model="tiny", eval_batches=1)
    )
    batches = (data.train.next_batch(4) for _ in range(2000))
    with pytest.raises(ConfigError, match=r"what comes after 40 documents cannot be read \("):
        list(batches)


@pytest.mark.parametrize("name", ["hf:", "hf:.", "hf:..", "hf:../..", "hf::part", "hf:/"])
def test_a_dataset_without_a_name_is_not_the_current_folder(name, folders, monkeypatch):
    monkeypatch.chdir(folders / "documents")  # whose files would be taken
    with pytest.raises(ConfigError, match=f"--data {re.escape(name)}: names no dataset"):
        open_data(Config(data=name, seq_len=SEQ, model="tiny"))


def test_a_position_of_another_kind_of_source_is_refused(folders):
    sources = [
        Config(data=str(folders / name), encoding="bytes", seq_len=SEQ)
        for name in ("text", "parquet")
    ]
    sources[1] = replace(sources[1], eval_batches=2)
    arrays, stream = (open_data(source).train for source in sources)
    for one, other in ((arrays, stream), (stream, arrays)):
        with pytest.raises(ConfigError, match="resume with the --data"):
            one.load_state_dict(other.state_dict())
