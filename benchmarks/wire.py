"""`gc-bench wire`: bytes of a push on the network, by the counters of a network interface.

The server runs in a network namespace of its own, behind a veth pair (`star`). The kernel counts the bytes
that enter the pair, with HTTP/2, gRPC, TCP, IP and Ethernet headers. Acknowledgements travel in the other
direction and are not counted. The bytes are compared with the least possible number. For compressors that
send every element, that is the size of the payload, codes and levels; the goal is at most 1.02. For
sparsifiers, it is the size of the values plus the entropy of the positions, if all are equally likely; the
goal is at most 1.10.

A veth pair carries segments of up to 64 KiB. On a network with packets of 1500 bytes, TCP and IP add another
3.6 % to the bytes sent.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from typing import Any

import torch

from ..common.parts import divide
from ..compressors import LayerRule, ModelCompressor, Payload, SparsePayload, TensorSpec, wire_bytes
from . import output
from .arguments import at_least_one, json_option, option
from .pusher import Pusher, start_server
from .star import Star, check_network

SPECS = ["4bit", "topk:ratio=10", "topk:ratio=100", "topk:ratio=1000"]


def least_bytes(payload: Payload) -> float:
    """Return the bytes of a payload; for a sparse one, those of its values plus its indices' entropy."""
    if not isinstance(payload, SparsePayload):
        return wire_bytes(payload)
    p = payload.count / payload.elements
    entropy_bits = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) * payload.elements
    return wire_bytes(payload) - payload.index_bytes + entropy_bits / 8


def measure(compressor_spec: str, elements: int, pushes: int) -> dict[str, Any]:
    """Push a random gradient several times to a server of its own, and return a row as a JSON object.

    In the row, "least_bytes" is the least possible size of a push, and "interface_bytes" has the bytes on the
    interface for each push.

    Args:
        compressor_spec: spec of the compressor.
        elements: number of elements of the gradient.
        pushes: number of pushes.
    """
    spec = TensorSpec(name="weight", shape=(elements // 1000, 1000))
    whole = divide([spec.elements], 4 * spec.elements)
    compressor = ModelCompressor([spec], compressor_spec, LayerRule(), 1, 0, plan=whole)
    gradient = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
    (payload,) = compressor.compress([gradient], 32, version=0)
    counts: list[int] = []
    with (
        Star(["server"], None) as star,
        start_server("--insecure", prefix=star.prefix("server")) as port,
        contextlib.closing(Pusher(f"{star.address('server')}:{port}", payload)) as pusher,
    ):
        for _ in range(pushes):
            before, _ = star.carried("server")
            pusher.push()
            counts.append(star.carried("server")[0] - before)
            pusher.settle()
    return {
        "compressor": compressor_spec,
        "elements": spec.elements,
        "payload_bytes": wire_bytes(payload),
        "least_bytes": least_bytes(payload),
        "goal": 1.10 if isinstance(payload, SparsePayload) else 1.02,
        "interface_bytes": counts,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"compressors to measure (default: {' '.join(SPECS)})"
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", default=SPECS, help=text)
    option(parser, "--elements", at_least_one, 16_000_000, "N", "number of elements of the gradient")
    option(parser, "--pushes", at_least_one, 10, "N", "number of measured pushes")
    json_option(parser)


def run(given: argparse.Namespace) -> None:
    """Measure every compressor and print a line for each."""
    check_network()
    rows: list[dict[str, Any]] = []
    for compressor in given.compressors:
        row = measure(compressor, given.elements, given.pushes)
        mean = statistics.fmean(row["interface_bytes"])
        print(
            f"{compressor}: {given.pushes} pushes of {row['payload_bytes']} payload bytes, "
            f"{mean:.0f} each on the interface: {mean / row['least_bytes']:.4f} of the least "
            f"(goal {row['goal']:.2f}), 1/{4 * row['elements'] / mean:.2f} of float32",
            flush=True,
        )
        rows.append(row)
    output.write_json(given.json, rows)
