"""A peer of `step`: the same layers under torch's DistributedDataParallel over gloo, as a program.

    python -m gradwire.benchmarks.ddp MODEL SECONDS TRACE STEPS [RANK WORLD ADDRESS HOOK]

SECONDS and TRACE are arguments of `layers.task`: emulated computation, and a folder for the trace.
HOOK is `fp32`, `fp16`, `powersgd` (rank 4, everything in one bucket: with several it deadlocks under gloo),
or `gradwire:` and `COMPRESSOR[/EXCHANGE[/ENTROPY]]` for `gradwire.ddp`. Without the last four arguments the
process computes alone: no exchange, no optimizer.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from .. import ddp
from .arguments import BenchError
from .layers import task

RANK = 4  # of PowerSGD
LEARNING_RATE = 1e-3
WHOLE_MODEL_MB = 1 << 20  # a size of buckets that no model exceeds
OURS = "gradwire:"  # prefix of a hook that is a compressor of ours
HOOKS = "SPEC[/EXCHANGE[/ENTROPY]]"


def main(arguments: list[str]) -> int:
    """Train without a server, or compute alone, for a number of steps; return the exit code.

    Args:
        arguments: the program's arguments, which the head of this file lists.
    """
    model, seconds, trace, steps, *peers = arguments
    torch.set_num_threads(1)
    hook = ""
    if peers:
        rank, world, address, hook = peers
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(world))
    work = task(model, float(seconds), trace=trace)
    network, samples = work.model(), work.batch(np.arange(1))
    trained = distributed(network, hook) if hook else network
    optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
    for _ in range(int(steps)):
        optimizer.zero_grad()
        found: Any = work.loss(trained, samples)
        found.backward()
        if hook:
            optimizer.step()
    if hook:
        dist.destroy_process_group()
    return 0


def distributed(network: torch.nn.Module, hook: str) -> torch.nn.Module:
    """Return a network wrapped in DistributedDataParallel with the named hook."""
    bucket_mb = WHOLE_MODEL_MB if hook == "powersgd" else None
    # Statistics of batch normalization are not exchanged in a job either.
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(
        network, bucket_cap_mb=bucket_mb, broadcast_buffers=False
    )
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "powersgd":
        low_rank = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(low_rank, powerSGD_hook.powerSGD_hook)
    if hook.startswith(OURS):
        state = hook_state(hook.removeprefix(OURS), network)
        wrapped.register_comm_hook(state, ddp.hook)
    module: torch.nn.Module = wrapped
    return module


def hook_state(text: str, network: torch.nn.Module | None = None) -> ddp.HookState:
    """Return the state of a hook of ours, `COMPRESSOR[/EXCHANGE[/ENTROPY]]`; without a network, to check it.

    Raises BenchError if it cannot be parsed.
    """
    compressor, *more = text.split("/")
    options: dict[str, Any] = dict(zip(("exchange", "entropy"), more, strict=False))
    names = None if network is None else network.named_parameters()
    try:
        return ddp.state(compressor, named_parameters=names, **options)
    except ValueError as error:
        raise BenchError(f"--hooks: {error}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
