"""Tokenizers from files: the same tokens as their library's, in shards that need nothing else, and clear errors."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from gpt import tokenize_data, windows
from gpt.config import Config, parse
from gpt.data import open_data
from gpt.tokens import encode_bytes, open_encoding
from gpt.trainer import Trainer
from workers_gpt import write_parquet

from fp8stack.errors import ConfigError

TEXTS = [f"def f_{i}(x):\n    return x * {i} + größe  # {i % 7}\n" for i in range(400)]
TEXT = "".join(TEXTS) + " </s> <|endoftext|> in a text is text\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A byte-level BPE of 301 tokens, of which the last two are special, that cuts its input when it is asked to."""
    tokenizers = pytest.importorskip("tokenizers")
    table = tokenizers.Tokenizer(tokenizers.models.BPE())
    table.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    table.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=299, initial_alphabet=alphabet, show_progress=False
    )
    table.train_from_iterator(TEXTS, trainer)
    table.add_special_tokens(["</s>", "<|endoftext|>"])
    table.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 299)]
    )
    table.enable_truncation(8)
    path = tmp_path_factory.mktemp("tokenizer") / "own.json"
    table.save(str(path))
    return path


def test_texts_come_back_without_special_tokens_of_the_tokenizer_s_own(file, monkeypatch):
    encoding = open_encoding(str(file))
    assert (encoding.size, encoding.vocab_size, encoding.dtype) == (301, 320, np.uint16)
    assert encoding.separator == (300,)  # before </s>
    assert encoding.note == "vocabulary of 301 tokens (own.json), padded to 320, a multiple of 64"
    tokens = encoding.encode(TEXT)
    assert 8 < len(tokens) < len(TEXT)
    assert not {299, 300} & set(tokens)
    assert encoding.decode([*tokens, 310]) == TEXT  # 310: of the padding
    assert encoding.decode([300]) == "<|endoftext|>"
    monkeypatch.setattr("gpt.tokens.PIECE", 1000)
    tokens = encode_bytes(encoding, TEXT.encode())  # by pieces of whole lines
    assert tokens.dtype == np.uint16
    assert encoding.decode(tokens.tolist()) == TEXT


@pytest.mark.parametrize("source", ["text", "documents"])
def test_shards_bring_their_tokenizer(file, tmp_path, monkeypatch, source, capsys):
    (tmp_path / "text").mkdir()
    for name in ("a", "b", "valid"):
        (tmp_path / "text" / f"{name}.txt").write_text(TEXT)
    data = f"hf:{tmp_path / 'text'}" if source == "documents" else str(tmp_path / "text")
    folder = tmp_path / "shards"
    given = ["--data", data, "--encoding", str(file), "--shards", str(folder)]
    if source == "documents":
        pytest.importorskip("datasets")
    if source == "text":  # the tokenizer may lie there already
        folder.mkdir()
        given[3] = str(shutil.copyfile(file, folder / "tokenizer.json"))
    assert tokenize_data.main(given) == 0
    assert json.loads((folder / "meta.json").read_text()) == {"encoding": "tokenizer.json"}
    moved = folder.rename(tmp_path / "elsewhere")
    config = Config(data=str(moved), seq_len=16, model="tiny")
    read = open_data(config)
    assert read.vocab_size == 320
    assert TEXTS[0] in read.decode(read.train.parts[0])
    separators = int((read.train.parts[0] == 300).sum())
    assert separators == (2 if source == "documents" else 0)
    with pytest.raises(ConfigError, match=r"are of .*tokenizer\.json\. Leave it out"):
        open_data(Config(data=str(moved), encoding=str(file)))
    flags = (
        "--model tiny --steps 2 --eval-batches 2 --checkpoint-freq 0 --device cpu --no-tensorboard"
    )
    flags += f" --data {moved} --out {tmp_path / 'runs'}"
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # trains without it, but for samples
    with pytest.warns(UserWarning, match="no samples of text.*needs the package tokenizers"):
        assert np.isfinite(Trainer(parse(flags.split())).run()).all()
    assert "padded to 320" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read.*Give the tokenizer.json of a model, or one of bytes, gpt2"),
        ("no JSON", "is no tokenizer of Hugging Face's.*JSONDecodeError"),
        ('{"add_bos_token": true}', "is no tokenizer.*model.*tokenizer_config.json"),
        ('{"model": {"vocab": {"a": 0}}}', "is no tokenizer"),  # says the library
    ],
)
def test_files_that_are_no_tokenizers_are_refused(tmp_path, content, message):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_encoding(str(path)).encode("a")


# --- what tokenize_data.py sets aside

DOCUMENTS = [letter * 30 for letter in "abcdefghij"]  # 32 tokens each: bytes, and a separator


def write_documents(folder, texts):
    folder.mkdir()
    write_parquet(folder / "x.parquet", text=texts)
    return ["--data", str(folder), "--encoding", "bytes"]


@pytest.mark.parametrize("texts", [DOCUMENTS, ["a", "b" * 500]])
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


@pytest.mark.parametrize("error", [ConfigError("the source broke off"), KeyboardInterrupt()])
def test_shards_appear_all_or_none(tmp_path, monkeypatch, capsys, error):
    shards = tmp_path / "shards"
    given = [*write_documents(tmp_path / "few", DOCUMENTS), "--shards", str(shards)]
    given += ["--shard-tokens", "64", "--val-tokens", "32"]
    (shards / ".partial").mkdir(parents=True)  # of one that was killed
    (shards / ".partial" / "train_000099.bin").write_bytes(b"old")
    (shards / "notes.txt").write_text("mine")
    real = tokenize_data._write

    def breaking(parts, path):
        if path.name == "train_000002.bin":
            raise error
        real(parts, path)

    with monkeypatch.context() as patch:
        patch.setattr(tokenize_data, "_write", breaking)
        told = isinstance(error, ConfigError)
        assert tokenize_data.main(given) == (2 if told else 130)
    assert [path.name for path in shards.rglob("*")] == ["notes.txt"]
    assert capsys.readouterr().err == "error: the source broke off\n" * told
    assert tokenize_data.main(given) == 0
    names = {path.name for path in shards.iterdir()} - {"notes.txt"}
    assert names == {"meta.json", "val_000000.bin", *(f"train_{i:06d}.bin" for i in range(5))}
