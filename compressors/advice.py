"""Warnings about combinations of compressor and optimizer that were measured to lose, with alternatives.

A job logs them when it starts. The figures are those of `gc-bench accuracy adam`
(docs/explanation/accuracy.md#adam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from ..common.spec import parse_spec
from ..optim.steps import OptimizerOptions
from .registry import AUTO, CompressorSpec, compressor_of, parse_compressor
from .wrapping import WRAPPING_KEYS

if TYPE_CHECKING:
    from .base import TensorSpec

INSTEAD = (
    "use 4bit, which loses little, or 8bit; for even fewer bytes 4bit with --mode "
    "local:steps=8,correction=0, whose workers run the optimizer and exchange every eighth step"
)
INSTEAD_WITHOUT_SERVER = "use 4bit, which loses little, or 8bit"
# Smallest loss with Adam, as a multiple of the uncompressed one, that a warning names. The loss of one seed
# varies by as much.
LOSES = 1.02


# Options of a compressor where the optimizer is Adam, and the keys with which its spec refuses them all.
#   4bit: with feedback unsent values arrive later and larger, and enter Adam's denominators.
#   lowrank: rank 4 leaves out too much of the gradient, and the noise of 4 bits enters Adam's denominators.
WITH_ADAM: Mapping[str, tuple[Mapping[str, str], Set[str]]] = {
    "4bit": ({"feedback": "off"}, {*WRAPPING_KEYS, "levels"}),
    "lowrank": ({"rank": "8", "values": "8bit"}, set()),
}


def suited(compressor: CompressorSpec, optimizer: OptimizerOptions, *, local: bool) -> CompressorSpec:
    """Return the compressor adjusted to an optimizer: where the server's is Adam, `4bit` without feedback,
    and `lowrank` with `rank=8,values=8bit`.

    Keys that a spec sets are kept, and every other compressor is returned as it is.

    Args:
        compressor: compressor of the workers.
        optimizer: optimizer of the job.
        local: True if workers run the optimizer, and compress the changes that their steps make.
    """
    if local or compressor.name not in WITH_ADAM or not optimizer.undoes_weights:
        return compressor
    given = parse_spec("compressor", compressor.text).options
    options, refusing = WITH_ADAM[compressor.name]
    more = [f"{key}={value}" for key, value in options.items() if key not in given]
    if not more or refusing & set(given):
        return compressor
    return parse_compressor(f"{compressor}{',' if given else ':'}{','.join(more)}")


def advice(
    compressor: CompressorSpec, optimizer: OptimizerOptions, *, local: bool, server: bool = True
) -> list[str]:
    """Return a warning for each reason to choose another combination; empty if there is none.

    Args:
        compressor: compressor of the workers.
        optimizer: optimizer of the job.
        local: True if workers run the optimizer, and compress the changes that their steps make.
        server: True if there is a server; False if each rank runs the optimizer.
    """
    wrapping, lines = compressor.wrapping, list[str]()
    runs = "the server's optimizer" if server else "the optimizer"
    if wrapping is not None and wrapping.momentum:
        if local:
            lines.append(
                f"the momentum of {compressor} acts on the changes that local steps make, besides what "
                "--optimizer and the mode's outer optimizer have; give it momentum=0 unless that is meant"
            )
        elif optimizer.has_momentum:
            plain = "start the server with plain sgd" if server else "take plain SGD"
            lines.append(
                f"momentum is applied twice: by {compressor} and by {runs}; {plain}, or give the compressor "
                "momentum=0"
            )
    loss = compressor.adam_loss if optimizer.undoes_weights and not local else None
    if loss is not None and loss > LOSES:
        lines.append(
            f"{compressor} loses where {runs} is {type(optimizer).__name__}: a small GPT ended at {loss:g} "
            f"times the uncompressed loss; {INSTEAD if server else INSTEAD_WITHOUT_SERVER}"
        )
    return lines


# `lowrank` computes longer than `4bit`. It is faster if it sends less than this share of the bytes.
FEWER = 0.5


def compressor_for(spec: str, specs: Sequence[TensorSpec]) -> tuple[CompressorSpec, str]:
    """Return the compressor of a job for a model, and why, for the log. Server and workers get the same.

    A server keeps `auto` without options only with SGD (`server/checks`). Then it is `lowrank:values=8bit` if
    that sends far fewer bytes than `4bit`, both packed and both ways. With SGD that lost nothing on digits,
    but made ResNet-20 learn more slowly, with 4 bits even more, as PowerSGD did. The log says so.

    Args:
        spec: the job's --compressor.
        specs: tensors of the model.
    """
    if spec != AUTO:
        return compressor_of(spec)[0], "it was asked for"
    low_rank, four_bit = parse_compressor("lowrank:values=8bit"), compressor_of(AUTO)[0]
    counted = [
        sum(coding.packed_bytes(each.shape) for coding in (costs.up, costs.down(1)) for each in specs)
        for costs in (low_rank.compression(), four_bit.compression())
    ]
    fewer = counted[0] < FEWER * counted[1]
    why = "{:.3f} MB per worker and version instead of {:.3f} MB".format(*(each / 1e6 for each in counted))
    if fewer:
        why += f" with {four_bit}; with SGD it lost nothing on digits, but slowed ResNet-20 more than 4bit"
        return low_rank, why
    return four_bit, f"lowrank would send {why}"
