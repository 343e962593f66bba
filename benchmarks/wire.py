"""How many bytes a push takes on the network, by the counters of a network interface.

    sudo python -m gradwire.benchmarks.wire [--elements 16000000] [--pushes 10] [--json FILE]

The server runs in a network namespace of its own, behind a veth pair; the bytes that enter the pair are what
the kernel says was sent, with HTTP/2, gRPC, TCP, IP and Ethernet headers, acknowledgements not counted since
they go the other way. They are compared with the payload: codes and levels. The goal for a dense 4-bit push
is at most 1.02.

A veth pair carries segments of up to 64 KiB. On a network with packets of 1500 bytes, TCP and IP take another
3.6 % of whatever is sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import torch

from ..compressors import LayerRule, ModelCompressor, QuantizedPayload, TensorSpec
from .pusher import Pusher, start_server

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Count a push's bytes on a network interface.")
    parser.add_argument("--elements", type=int, default=16_000_000)
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    spec = TensorSpec(name="weight", shape=(arguments.elements // 1000, 1000))
    compressor = ModelCompressor([spec], "4bit", LayerRule(), 1, 0)
    gradient = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
    (payload,) = compressor.compress([gradient], 32, version=0)
    assert isinstance(payload, QuantizedPayload)
    size = int(payload.data.size) + payload.levels.nbytes

    counts: list[int] = []
    with (
        namespace(),
        start_server("--insecure", prefix=("ip", "netns", "exec", SPACE)) as port,
        contextlib.closing(Pusher(f"{FAR_ADDRESS}:{port}", payload)) as pusher,
    ):
        for _ in range(arguments.pushes):
            before = sent_bytes()
            pusher.push()
            counts.append(sent_bytes() - before)
            pusher.settle()
    mean = sum(counts) / len(counts)
    print(f"{len(counts)} pushes of {size} payload bytes: {mean:.0f} bytes each on the interface")
    print(f"{mean / size:.4f} of the payload (goal 1.02), 1/{arguments.elements * 4 / mean:.2f} of float32")
    if arguments.json:
        report = {"elements": arguments.elements, "payload_bytes": size, "interface_bytes": counts}
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
