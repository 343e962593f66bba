"""Characters: a small GPT that predicts the next character of a text.

By default the text is the source code of Python's standard library, so nothing is downloaded. It is the first
million characters of the top-level modules, in the order of their names. Modules that begin with an
underscore are left out, because some of them are made when Python is built. All workers need the same release
of Python then.

A character is a byte: any file is accepted, and the model does not depend on its content.

The model is a smaller GPT-2: learned positions, blocks with LayerNorm before attention and before a layer of
four times the width with GELU, and an embedding that is also the last layer. Source: A. Radford et al.,
"Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..training.splits import parse_split
from .task import Task, TaskSpecError

ALPHABET = 256
HEAD_WIDTH = 32
HELD_OUT = 20  # the last 1/20 of the characters validates
EVALUATED_AT_ONCE = 64  # samples per evaluation batch, so that their scores take a few megabytes


def characters(
    data: Path | None = None,
    characters: int = 1_000_000,
    context: int = 64,
    layers: int = 2,
    width: int = 128,
    split: str = "",
) -> Task:
    """Make the task. A sample is `context` characters of the text and the character that follows each.

    Args:
        data: a file, or a folder of which all files except hidden ones are read, in the order of their paths;
            None for the standard library.
        characters: largest number of characters to read. The last twentieth validates, the rest trains.
        context: number of characters that the model sees.
        layers: number of blocks.
        width: of the embedding, a multiple of 32; there is one attention head for each 32.
        split: how samples are divided among workers; see `splits.parse_split`. The class of a sample is the
            file in which it begins.

    Raises:
        TaskSpecError: the data cannot be read or are too short, or an option is out of range.
    """
    for option, value, most in (
        ("characters", characters, 1 << 30),
        ("context", context, 4096),
        ("layers", layers, 64),
        ("width", width, 4096),
    ):
        _expect(1 <= value <= most, f"option {option}: expected 1 to {most}, got {value}")
    _expect(width % HEAD_WIDTH == 0, f"option width: expected a multiple of {HEAD_WIDTH}, got {width}")
    text, ends = _read(data, characters)
    held_out = len(text) // HELD_OUT
    _expect(
        held_out > context,
        f"expected at least {HELD_OUT * (context + 1)} characters for context={context}, got {len(text)}"
        f"{f' in {data}' if data is not None else ''}; use a longer text or a smaller context",
    )
    train, validation = text[:-held_out], text[-held_out:]
    train_samples = _samples(train, context)
    try:
        shares = parse_split(split, np.searchsorted(ends, np.arange(train_samples) * context, side="right"))
    except ValueError as error:
        raise TaskSpecError(f"task 'characters': option {error}") from None

    def batch(indices: npt.NDArray[np.int64]) -> Tensor:
        return _windows(train, torch.as_tensor(indices), context)

    def loss(network: nn.Module, windows: Tensor) -> Tensor:
        scores, following = _predicted(network, windows)
        return functional.cross_entropy(scores, following)

    def evaluate(network: nn.Module) -> Mapping[str, float]:
        device = next(network.parameters()).device
        windows = _windows(validation, torch.arange(_samples(validation, context)), context)
        total, right = 0.0, 0
        for first in range(0, len(windows), EVALUATED_AT_ONCE):
            some = windows[first : first + EVALUATED_AT_ONCE].to(device)
            scores, following = _predicted(network, some)
            total += functional.cross_entropy(scores, following, reduction="sum").item()
            right += int((scores.argmax(dim=1) == following).sum().item())
        predictions = len(windows) * context
        return {"loss": total / predictions, "accuracy": right / predictions}

    return Task(
        name=f"characters of {data if data is not None else 'the standard library'}",
        train_samples=train_samples,
        model=lambda: Gpt(context, layers, width),
        batch=batch,
        loss=loss,
        evaluate=evaluate,
        groups=lambda network: [{"params": _attentions(network), "split": 3}],
        split=shares,
    )


def _attentions(network: nn.Module) -> list[Tensor]:
    """Return the weights of the attention layers. Each holds the matrices of query, key and value, one above
    the other, and Muon has to step the three separately."""
    return [block.attention.weight for block in network.modules() if isinstance(block, Block)]


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TaskSpecError(f"task 'characters': {otherwise}")


def _read(data: Path | None, most: int) -> tuple[Tensor, list[int]]:
    """Return the first `most` characters of all files, uint8, (characters,), and the end of each file."""
    text, ends = bytearray(), list[int]()
    try:
        for path in _files(data):
            with path.open("rb") as file:
                text += file.read(most - len(text))
            ends.append(len(text))
            if len(text) == most:
                break
    except OSError as error:
        raise TaskSpecError(
            f"task 'characters': option data: {error}; every worker needs this file"
        ) from None
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8), ends


def _files(data: Path | None) -> Iterator[Path]:
    if data is None:
        yield from sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    elif data.is_dir():
        for path in sorted(data.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(data).parts)
            if path.is_file() and not hidden:
                yield path
    else:
        yield data


def _samples(text: Tensor, context: int) -> int:
    """Count the samples in a text, which lie end to end, without an incomplete one at its end."""
    return (len(text) - 1) // context


def _windows(text: Tensor, numbers: Tensor, context: int) -> Tensor:
    """Return the samples with these numbers and the character after each, int64, (samples, context + 1)."""
    return text[numbers[:, None] * context + torch.arange(context + 1)].long()


def _predicted(network: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of all predictions, (predictions, ALPHABET), and the true next characters."""
    scores: Tensor = network(windows[:, :-1])
    return scores.flatten(0, 1), windows[:, 1:].flatten()


class Gpt(nn.Module):
    """Maps text, int64 (samples, length), at most `context` long, to scores of the next characters, float32
    (samples, length, ALPHABET)."""

    def __init__(self, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        # Smaller weights where a block adds to its input, so that the sum does not grow with the layers.
        for block in cast("list[Block]", list(self.blocks)):
            for last in (block.joined, block.narrow):
                nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        values = self.embedding(text) + self.positions[: text.shape[1]]
        return functional.linear(self.norm(self.blocks(values)), self.embedding.weight)


class Block(nn.Module):
    """Attention, then two linear layers at each position, both with residual connections: (samples, length,
    width) to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.before_wide = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        attention: Any = self.attention(self.before_attention(values))
        query, key, value = attention.unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.joined(attended.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.wide(self.before_wide(values)))
        narrow: Tensor = self.narrow(wide)
        return values + narrow
