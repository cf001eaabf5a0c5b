"""What a model is worth: validation loss, a text that it writes, and the accuracy on HellaSwag from a local file.

HellaSwag (arXiv:1905.07830) asks which of four endings continues a text. The answer of a model is the ending with the
highest log-likelihood of its tokens after the text, divided by the ending's length in characters. A line of the file is
a JSON object with "ctx", "endings" (four strings) and "label" (the index of the right one), as published.

Ranks share the work, and all of them run as many forwards: sharded models talk to each other in each.

Limits: numbers depend on the tokenizer; a text that does not fit into the window loses its beginning,
and an ending that does not its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.errors import ConfigError

from .data import Data
from .model import GPT
from .ranks import rank_and_world

Encode = Callable[[str], Tensor]  # [T], int64
Autocast = Callable[[], AbstractContextManager[object]]
T = TypeVar("T")
SAMPLE_TOKENS = 64
AT_ONCE = 4  # questions in a forward
PROMPT = "The "


@dataclass(frozen=True)
class Question:
    context: str
    endings: tuple[str, ...]
    label: int


def validation_loss(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],  # tokens and targets, each [B, T], int64
    device: torch.device,
    autocast: Autocast,
) -> float:
    """Return the mean loss over all batches' rows, the same on all ranks and, to rounding, for any size of batches."""

    def measure(batch: tuple[Tensor, Tensor]) -> float:
        tokens, targets = (part.to(device) for part in batch)
        with autocast():
            return float(model(tokens, targets))

    # a last batch that is short counts for less; whole ones count 1, for the bits of a plain mean
    size = max((len(tokens) for tokens, _ in batches), default=1)
    weights = [len(tokens) / size for tokens, _ in batches]
    return _mean(model, batches, weights, measure, device)


def write_sample(
    model: GPT, data: Data, seed: int, device: torch.device, autocast: Autocast
) -> str:
    """Return what the model makes of PROMPT: the same text for the same weights. A compiled model runs eagerly here.

    Each length of a text would be compiled, which takes longer than a text that grows.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = data.encode(PROMPT).to(device)
    with autocast(), torch.compiler.set_stance("force_eager"):
        tokens = model.generate(prompt, SAMPLE_TOKENS, generator)
    return data.decode(tokens)


def read_questions(path: Path) -> list[Question]:
    """Read a file of HellaSwag.

    Raises:
        ConfigError: if it cannot be read, or a line is not as described; says which.
    """
    questions = []
    try:
        # not splitlines: JSON's texts may hold U+2028 and others that it takes for ends of lines
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is no UTF-8 text: {error}"
        raise ConfigError(
            f"--hellaswag {path}: cannot be read ({reason}). Give a JSONL file."
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            context, endings, label = entry["ctx"], entry["endings"], entry["label"]
            if not isinstance(endings, list) or isinstance(label, float):
                raise ValueError('"endings" must be a list, and "label" a whole number')
            for text in (context, *endings):
                if not isinstance(text, str) or not text:
                    raise ValueError("an empty text or ending, or one that is no text")
                text.encode()
            question = Question(context, tuple(endings), int(label))
            if question.label not in range(len(question.endings)):
                raise ValueError(f"there is no ending {question.label}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'--hellaswag {path}: line {number} is not an object with "ctx", "endings" and "label" ({error}).'
            ) from None
        questions.append(question)
    if not questions:
        raise ConfigError(f"--hellaswag {path}: has no lines. Give the published JSONL file.")
    return questions


def hellaswag_accuracy(
    model: nn.Module,
    questions: Sequence[Question],
    encode: Encode,
    seq_len: int,
    device: torch.device,
    autocast: Autocast,
) -> float:
    """Return the share of questions answered right, the same on all ranks."""

    def share_right(part: Sequence[Question]) -> float:
        scores = score_endings(model, part, encode, seq_len, device, autocast)
        right = [int(s.argmax()) == q.label for s, q in zip(scores, part, strict=True)]
        return sum(right) / len(part)

    # of like length, for little padding
    ordered = sorted(questions, key=lambda q: len(q.context) + max(map(len, q.endings)))
    parts = [ordered[i : i + AT_ONCE] for i in range(0, len(ordered), AT_ONCE)]
    return _mean(model, parts, [float(len(part)) for part in parts], share_right, device)


def score_endings(
    model: nn.Module,
    questions: Sequence[Question],
    encode: Encode,
    seq_len: int,
    device: torch.device,
    autocast: Autocast,
) -> list[Tensor]:
    """Return for each question [endings], float32, on the CPU: the log-likelihood for each character."""
    rows, tails, lengths = [], [], []
    for question in questions:
        context = encode(question.context)
        for ending in question.endings:
            whole = encode(" " + ending)
            tail = whole[: seq_len - 1]
            rows.append(torch.cat((context, tail))[-(seq_len + 1) :])
            tails.append(len(tail))
            lengths.append(len(ending) * len(tail) / len(whole))
    longest = max(len(row) for row in rows)
    tokens = torch.stack([F.pad(row, (0, longest - len(row))) for row in rows]).to(device)
    with autocast():
        logits = model(tokens[:, :-1])  # causal: what is padded comes after what counts
    # [all endings, T]: of each token after those before it
    likelihood = -F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
    scores = []
    for row, tail, length, own in zip(rows, tails, lengths, likelihood, strict=True):
        end = len(row) - 1
        scores.append(own[end - tail : end].sum() / length)
    return list(torch.stack(scores).cpu().split([len(q.endings) for q in questions]))


@torch.no_grad()
def _mean(
    model: nn.Module,
    items: Sequence[T],
    weights: Sequence[float],
    measure: Callable[[T], float],
    device: torch.device,
) -> float:
    """Return the weighted mean of `measure` over all items; each rank takes every `world`-th."""
    rank, world = rank_and_world()
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(items), world):
        mine = first + rank
        # the last one again, where there are no more
        value = measure(items[min(mine, len(items) - 1)])
        total += value * weights[mine] if mine < len(items) else 0.0
    model.train(training)
    if world > 1:
        dist.all_reduce(total)
    return total.item() / sum(weights)
