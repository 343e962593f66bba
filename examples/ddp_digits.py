"""Digits under torchrun: Gradwire's compressors in torch's DistributedDataParallel, without a server.

    torchrun --nproc-per-node 2 examples/ddp_digits.py --compressor 4bit
    torchrun --nproc-per-node 2 examples/ddp_digits.py --plain              # plain DDP, for comparison

docs/how-to/ddp.md describes the hook.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.ddp
from gradwire.worker.tasks.digits import digits

LEARNING_RATE = 0.1


def main() -> None:
    """Train the built-in digits task on every rank; rank 0 prints the accuracy and the bytes sent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compressor", default="4bit", help="compressor spec, as for gc-worker (default: %(default)s)"
    )
    parser.add_argument("--plain", action="store_true", help="plain DDP, without Gradwire's hook")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks, batch = dist.get_rank(), dist.get_world_size(), given.batch_size
    torch.manual_seed(given.seed)
    work = digits()
    network = work.model()
    model: Any = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    state = None
    if not given.plain:
        state = gradwire.ddp.register(
            model, given.compressor, optimizer=optimizer, seed=given.seed, samples=batch
        )
    shuffled = torch.Generator().manual_seed(given.seed)
    for epoch in range(given.epochs):
        if state is not None:
            state.epoch = epoch
        order = torch.randperm(work.train_samples, generator=shuffled).numpy()
        for step in range(len(order) // (ranks * batch)):
            start = (step * ranks + rank) * batch
            optimizer.zero_grad()
            loss: Any = work.loss(model, work.batch(order[start : start + batch]))
            loss.backward()
            optimizer.step()

    if rank == 0:
        name, accuracy = "plain" if given.plain else given.compressor, work.evaluate(network)["accuracy"]
        line = f"{name}, {ranks} ranks, seed {given.seed}: validation accuracy {accuracy:.3f}"
        if state is not None:
            times = state.raw_bytes / state.bytes_sent
            line += f"; {state.bytes_sent / 1e6:.3f} MB per rank, {times:.2f} times fewer than as float32"
        print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
