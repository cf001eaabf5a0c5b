"""Validation and HellaSwag: numbers that depend on the weights and the texts, not on how they are cut or written."""

import contextlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpt import evaluation
from gpt.evaluation import Question
from gpt.model import GPT, SIZES
from gpt.windows import spaced_batches
from torch import nn

from fp8stack.errors import ConfigError

CPU = torch.device("cpu")


class Table(nn.Module):
    """A loss of any number for each row, averaged as a model's is."""

    def forward(self, tokens, targets):
        return (tokens + 3 * targets).sin().mean()


class Repeats(nn.Module):
    """Expects every byte to come again, and every other one alike."""

    def forward(self, tokens):
        return 3.0 * nn.functional.one_hot(tokens, 256).float()


def encode(text):
    return torch.tensor(list(text.encode()))


@pytest.mark.parametrize(("rows", "size"), [(13, 4), (13, 12), (13, 20), (12, 1), (12, 4)])
def test_validation_losses_do_not_depend_on_the_size_of_batches(rows, size):
    tokens = np.random.default_rng(0).integers(0, 200, 16 * rows + 1).astype(np.uint16)

    def validate(size):
        batches = spaced_batches([tokens], 16, rows, size, 256)[: -(-rows // size)]
        losses = [float(Table()(*batch)) for batch in batches]
        return evaluation.validation_loss(Table(), batches, CPU, torch.no_grad), losses

    loss, losses = validate(size)
    assert loss == pytest.approx(validate(1)[0], rel=1e-6)
    if rows == 12:  # whole batches have the bits of a plain mean
        assert loss == torch.tensor(losses, dtype=torch.float64).sum().item() / len(losses)


def test_hellaswag_picks_the_likeliest_ending_for_its_length():
    longer = Question("ab" * 9, ("c", "abc"), 0)  # whose rows the others are padded to
    question = Question("aaaa", ("bcbcbcbc", "aaaa", "xyz", "aab"), 1)
    model, where = Repeats(), (CPU, torch.no_grad)
    _, scores = evaluation.score_endings(model, [longer, question], encode, 64, *where)
    again, other = 3 - math.log(math.e**3 + 255), -math.log(math.e**3 + 255)
    expected = [9 * other / 8, (3 * again + 2 * other) / 4, 4 * other / 3, (again + 3 * other) / 3]
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)
    questions = [question, replace(question, label=3)] * 3
    assert evaluation.hellaswag_accuracy(model, questions, encode, 64, *where) == 0.5
    (cut,) = evaluation.score_endings(model, [question], encode, 4, *where)
    three = again + 2 * other  # of the first three tokens of the second and the last
    expected = [other * 9 / 8, three * 5 / 3 / 4, other * 4 / 3, three * 4 / 3 / 3]
    assert cut.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "line",
    [
        {"ctx": 5, "endings": ["a", "b"], "label": 0},
        {"ctx": "a", "endings": ["b", "c"], "label": 0.7},
        {"ctx": "a", "endings": ["b", "c"], "label": 2},
        [],
    ],
    ids=str,
)
def test_questions_that_are_no_texts_are_refused_before_the_run(line, tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    good = {"ctx": "größe\u2028next\x85", "endings": ["b", "c"], "label": "1"}
    text = json.dumps(good, ensure_ascii=False)
    path.write_bytes(f"{text}\r\n\n{text}\n".encode())  # UTF-8, with any ends of lines
    assert evaluation.read_questions(path) == [Question(good["ctx"], ("b", "c"), 1)] * 2
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
    with pytest.raises(ConfigError, match="line 2 is not an object with"):
        evaluation.read_questions(path)


def test_a_sample_compiles_nothing(monkeypatch):
    monkeypatch.setattr(evaluation, "SAMPLE_TOKENS", 64)  # whatever others have made of it
    model, compiled = GPT(SIZES["tiny"]), []
    model.materialize(CPU)
    data = SimpleNamespace(encode=encode, decode=lambda tokens: len(tokens))
    written = evaluation.write_sample(model, data, 0, CPU, contextlib.nullcontext)
    assert written == len(evaluation.PROMPT) + evaluation.SAMPLE_TOKENS
    model.compile(backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    evaluation.write_sample(model, data, 0, CPU, contextlib.nullcontext)
    assert compiled == []
    with torch.no_grad():
        model(encode("text")[None])
    assert len(compiled) > 0
    torch.compiler.reset()
