"""Tokenizers from files: the same tokens as their library's, in shards that need nothing else, and clear errors."""

import json
import shutil
import sys

import numpy as np
import pytest
from gpt import hub, tokenize_data
from gpt.config import Config, parse
from gpt.data import open_data
from gpt.tokens import TokenizerFile, encode_bytes, open_encoding
from gpt.trainer import Trainer

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


def test_texts_come_back_without_special_tokens_of_the_tokenizer_s_own(file):
    encoding = open_encoding(str(file))
    assert (encoding.size, encoding.vocab_size, encoding.dtype) == (301, 320, np.uint16)
    assert encoding.separator == (300,)  # before </s>
    assert encoding.note == "vocabulary of 301 tokens (own.json), padded to 320, a multiple of 64"
    tokens = encoding.encode(TEXT)
    assert 8 < len(tokens) < len(TEXT)
    assert not {299, 300} & set(tokens)
    assert encoding.decode([*tokens, 310]) == TEXT  # 310: of the padding
    assert encoding.decode([300]) == "<|endoftext|>"


def test_long_texts_are_encoded_by_pieces_of_whole_lines(file, monkeypatch):
    encoding = open_encoding(str(file))
    monkeypatch.setattr("gpt.tokens.PIECE", 1000)
    tokens = encode_bytes(encoding, TEXT.encode())
    assert tokens.dtype == np.uint16
    assert encoding.decode(tokens.tolist()) == TEXT
    assert encode_bytes(encoding, b"").shape == (0,)


@pytest.mark.parametrize("source", ["text", "documents"])
def test_shards_bring_their_tokenizer(file, tmp_path, monkeypatch, source):
    (tmp_path / "text").mkdir()
    for name in ("a", "b", "valid"):
        (tmp_path / "text" / f"{name}.txt").write_text(TEXT)
    data = f"hf:{tmp_path / 'text'}" if source == "documents" else str(tmp_path / "text")
    folder = tmp_path / "shards"
    given = ["--data", data, "--encoding", str(file), "--shards", str(folder)]
    if source == "documents":
        pytest.importorskip("datasets")
        assert hub.is_dataset(data)
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
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # trains without it, but for samples
    read = open_data(config)
    with pytest.warns(UserWarning, match="no samples of text.*needs the package tokenizers"):
        assert not read.readable
    assert read.vocab_size == 320


def test_a_run_trains_on_a_tokenizer_s_shards(file, tmp_path, capsys):
    (tmp_path / "book.txt").write_text(TEXT)
    shards, out = str(tmp_path / "shards"), str(tmp_path / "runs")
    given = ["--data", str(tmp_path / "book.txt"), "--encoding", str(file), "--shards", shards]
    assert tokenize_data.main(given) == 0
    flags = ["--model", "tiny", "--steps", "3", "--eval-batches", "2", "--checkpoint-freq", "0"]
    config = parse([*flags, "--data", shards, "--out", out, "--device", "cpu", "--no-tensorboard"])
    trainer = Trainer(config)
    losses = trainer.run()
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    assert trainer.model.embedding.num_embeddings == 320
    assert "padded to 320" in capsys.readouterr().out


def test_unigrams_are_counted_and_large_vocabularies_take_four_bytes(tmp_path):
    path = tmp_path / "tokenizer.json"
    vocab = [[f"t{i}", -1.0] for i in range(65_600)]
    added = [{"id": 65_600, "content": "<eos>"}]
    path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": vocab}, "added_tokens": added}))  # fmt: skip
    encoding = TokenizerFile(path)
    assert (encoding.size, encoding.vocab_size, encoding.dtype) == (65_601, 65_664, np.uint32)
    assert encoding.separator == (65_600,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read.*Give the tokenizer.json of a model, or one of bytes, gpt2"),
        ("no JSON", "is no tokenizer of Hugging Face's.*JSONDecodeError"),
        ("[]", "is no tokenizer"),
        ('{"add_bos_token": true}', "is no tokenizer.*model.*tokenizer_config.json"),
        ('{"model": {"vocab": {}}}', "is no tokenizer.*no numbered tokens"),
        ('{"model": {"vocab": {"a": "0"}}}', "is no tokenizer.*no numbered tokens"),
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
