"""How many bytes a push takes on the network, by the counters of a network interface.

    sudo python -m gradwire.benchmarks.wire [--elements 16000000] [--pushes 10] [--json FILE] [SPEC ...]

The server runs in a network namespace of its own, behind a veth pair; the bytes that enter the pair are what
the kernel says was sent, with HTTP/2, gRPC, TCP, IP and Ethernet headers, acknowledgements not counted since
they go the other way. They are compared with the least that they could be. Where every element is sent, that
is the payload, codes and levels; the goal is at most 1.02. Where some are, it is their values and the entropy
of where they are, if every place is equally likely; the goal is at most 1.10.

A veth pair carries segments of up to 64 KiB. On a network with packets of 1500 bytes, TCP and IP take another
3.6 % of whatever is sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..compressors import LayerRule, ModelCompressor, Payload, SparsePayload, TensorSpec, wire_bytes
from .pusher import Pusher, start_server

SPECS = ["4bit", "topk:ratio=10", "topk:ratio=100", "topk:ratio=1000"]
SPACE = f"gradwire-{os.getpid()}"
NEAR, FAR = f"gw{os.getpid() % 10**6}a", f"gw{os.getpid() % 10**6}b"
NEAR_ADDRESS, FAR_ADDRESS = "198.18.77.1", "198.18.77.2"  # of the block that is set aside for benchmarks


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextlib.contextmanager
def namespace() -> Generator[None]:
    """A network namespace behind a veth pair."""
    run("ip", "netns", "add", SPACE)
    try:
        run("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", SPACE)
        run("ip", "address", "add", f"{NEAR_ADDRESS}/30", "dev", NEAR)
        run("ip", "link", "set", NEAR, "up")
        run("ip", "-n", SPACE, "address", "add", f"{FAR_ADDRESS}/30", "dev", FAR)
        run("ip", "-n", SPACE, "link", "set", FAR, "up")
        yield
    finally:
        run("ip", "netns", "delete", SPACE)


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{NEAR}/statistics/tx_bytes").read_text())


@dataclass(frozen=True, kw_only=True)
class Row:
    """least_bytes: see the head of this file. interface_bytes: of each push."""

    compressor: str
    elements: int
    payload_bytes: int
    least_bytes: float
    goal: float
    interface_bytes: list[int]

    def __str__(self) -> str:
        mean = statistics.fmean(self.interface_bytes)
        return (
            f"{self.compressor}: {len(self.interface_bytes)} pushes of {self.payload_bytes} payload bytes, "
            f"{mean:.0f} each on the interface: {mean / self.least_bytes:.4f} of the least "
            f"(goal {self.goal:.2f}), 1/{4 * self.elements / mean:.2f} of float32"
        )


def least_bytes(payload: Payload) -> float:
    """Of the payload itself, or for a sparse one of its values and the entropy of its indices."""
    if not isinstance(payload, SparsePayload):
        return wire_bytes(payload)
    p = payload.count / payload.elements
    entropy_bits = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) * payload.elements
    return wire_bytes(payload) - payload.index_bytes + entropy_bits / 8


def measure(compressor_spec: str, elements: int, pushes: int) -> Row:
    """Push a random gradient so many times, to a server of its own."""
    spec = TensorSpec(name="weight", shape=(elements // 1000, 1000))
    compressor = ModelCompressor([spec], compressor_spec, LayerRule(), 1, 0)
    gradient = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
    (payload,) = compressor.compress([gradient], 32, version=0)
    counts: list[int] = []
    with (
        namespace(),
        start_server("--insecure", prefix=("ip", "netns", "exec", SPACE)) as port,
        contextlib.closing(Pusher(f"{FAR_ADDRESS}:{port}", payload)) as pusher,
    ):
        for _ in range(pushes):
            before = sent_bytes()
            pusher.push()
            counts.append(sent_bytes() - before)
            pusher.settle()
    return Row(
        compressor=compressor_spec,
        elements=spec.elements,
        payload_bytes=wire_bytes(payload),
        least_bytes=least_bytes(payload),
        goal=1.10 if isinstance(payload, SparsePayload) else 1.02,
        interface_bytes=counts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("compressors", nargs="*", metavar="SPEC", default=SPECS)
    parser.add_argument("--elements", type=int, default=16_000_000)
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for compressor in arguments.compressors:
        rows.append(measure(compressor, arguments.elements, arguments.pushes))
        print(rows[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
