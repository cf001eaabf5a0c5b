"""What tokenize_data.py sets aside: budgets of all parts together, and an error where nothing is left to train on."""

import re

import numpy as np
import pytest
from gpt import tokenize_data, windows

from fp8stack.errors import ConfigError

DOCUMENTS = [letter * 30 for letter in "abcdefghij"]  # 32 tokens each: bytes, and a separator


def write_documents(folder, texts):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir()
    parquet.write_table(pyarrow.table({"text": texts}), folder / "x.parquet")
    return ["--data", str(folder), "--encoding", "bytes"]


@pytest.mark.parametrize("texts", [DOCUMENTS, DOCUMENTS[:2], ["a", "b" * 500]])
def test_validation_that_leaves_nothing_to_train_on_is_refused_with_a_number_that_fits(
    tmp_path, texts, capsys
):
    given = [*write_documents(tmp_path / "few", texts), "--shards", str(tmp_path / "shards")]
    assert tokenize_data.main(given) == 2
    error = capsys.readouterr().err
    total = sum(map(len, texts)) + 2 * len(texts)
    assert f"takes all {len(texts)} documents" in error
    assert f"{total} tokens, and leaves none for training" in error
    assert not (tmp_path / "shards").exists()
    (number,) = re.findall(r"Give fewer, as --val-tokens (\d+)\.", error)
    assert tokenize_data.main([*given, "--val-tokens", number]) == 0
    _, train, held_out = windows.open_shards(tmp_path / "shards")
    assert sum(map(len, train)) > 0
    assert sum(map(len, held_out)) == int(number)


def test_budgets_are_of_all_shards_together(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for index in range(3):
        for name in ("train", "val"):
            tokens = np.arange(index * 100, (index + 1) * 100, dtype=np.uint16)
            tokens.tofile(source / f"{name}_{index}.bin")
    given = ["--data", str(source), "--shards", str(tmp_path / "new")]
    assert tokenize_data.main([*given, "--max-tokens", "150", "--val-tokens", "230"]) == 0
    _, train, held_out = windows.open_shards(tmp_path / "new")
    assert np.concatenate(train).tolist() == list(range(150))
    assert np.concatenate(held_out).tolist() == list(range(230))


@pytest.mark.parametrize("was_there", [False, True])
def test_shards_appear_all_or_none(tmp_path, monkeypatch, capsys, was_there):
    given = write_documents(tmp_path / "few", DOCUMENTS)
    shards = tmp_path / "shards"
    given += ["--shards", str(shards), "--shard-tokens", "64", "--val-tokens", "32"]
    if was_there:
        (shards / ".partial").mkdir(parents=True)  # of one that was killed
        (shards / ".partial" / "train_000099.bin").write_bytes(b"old")
        (shards / "notes.txt").write_text("mine")
    real = tokenize_data._write
    for error in (ConfigError("the source broke off"), KeyboardInterrupt()):

        def breaking(parts, path, error=error):
            if path.name == "train_000002.bin":
                raise error
            real(parts, path)

        monkeypatch.setattr(tokenize_data, "_write", breaking)
        assert tokenize_data.main(given) == (2 if isinstance(error, ConfigError) else 130)
        left = [path.name for path in shards.rglob("*")]
        assert left == (["notes.txt"] if was_there else [])
        assert shards.exists() == was_there
    assert capsys.readouterr().err == "error: the source broke off\n"
    monkeypatch.setattr(tokenize_data, "_write", real)
    assert tokenize_data.main(given) == 0
    names = {path.name for path in shards.iterdir()} - {"notes.txt"}
    assert names == {"meta.json", "val_000000.bin", *(f"train_{i:06d}.bin" for i in range(5))}
