"""Validation and HellaSwag: numbers that depend on the weights and the texts, not on how they are cut or written."""

import json

import numpy as np
import pytest
import torch
from gpt import evaluation
from gpt.windows import spaced_batches
from torch import nn

from fp8stack.errors import ConfigError

CPU = torch.device("cpu")


class Table(nn.Module):
    """A loss of any number for each row, averaged as a model's is."""

    def forward(self, tokens, targets):
        return (tokens + 3 * targets).sin().mean()


def validate(rows, size):
    tokens = np.random.default_rng(0).integers(0, 200, 16 * rows + 1).astype(np.uint16)
    batches = spaced_batches([tokens], 16, rows, size, 256)[: -(-rows // size)]
    return evaluation.validation_loss(Table(), batches, CPU, torch.no_grad), batches


def test_the_same_weights_have_the_same_validation_loss_for_any_size_of_batches():
    expected, _ = validate(13, 1)
    for size in (2, 4, 5, 12, 13, 20):
        assert validate(13, size)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_whole_batches_have_the_bits_of_a_plain_mean(size):
    loss, batches = validate(12, size)
    losses = [float(Table()(*batch)) for batch in batches]
    assert loss == torch.tensor(losses, dtype=torch.float64).sum().item() / len(losses)


@pytest.mark.parametrize(
    "line",
    [
        {"ctx": 5, "endings": ["a", "b"], "label": 0},
        {"ctx": "a", "endings": [1, 2], "label": 0},
        {"ctx": "a", "endings": "abcd", "label": 0},
        {"ctx": "a", "endings": ["b", "c"], "label": 0.7},
        {"ctx": "\ud800", "endings": ["b", "c"], "label": 0},
        {"ctx": "a", "endings": ["b", "c"], "label": 2},
        {"ctx": "", "endings": ["b"], "label": 0},
        {"ctx": "a"},
        [],
    ],
    ids=str,
)
def test_questions_that_are_no_texts_are_refused_before_the_run(line, tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    good = {"ctx": "a", "endings": ["b", "c"], "label": "1"}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
    with pytest.raises(ConfigError, match="line 2 is not an object with"):
        evaluation.read_questions(path)


def test_hellaswag_is_utf_8_whatever_the_locale_and_the_ends_of_lines_are(tmp_path, monkeypatch):
    path, read = tmp_path / "hellaswag.jsonl", type(tmp_path).read_text
    line = {"ctx": "größe\u2028next\x85", "endings": ["a", "b"], "label": 1}
    text = json.dumps(line, ensure_ascii=False)
    path.write_bytes(f"{text}\r\n\n{text}\n".encode())

    def in_latin_1(self, encoding=None, errors=None):
        return read(self, encoding or "latin-1", errors)

    monkeypatch.setattr(type(path), "read_text", in_latin_1)
    assert [q.context for q in evaluation.read_questions(path)] == [line["ctx"]] * 2
    path.write_bytes(b"\x1f\x8b{}")  # gzip's
    with pytest.raises(ConfigError, match=r"hellaswag.jsonl: cannot be read \(is no UTF-8 text"):
        evaluation.read_questions(path)
