"""Random histories of a job: the real state machine and store, workers that do anything, and an oracle.

Workers join, leave, crash and come back; their streams break; the clock jumps. A push is parts and a commit,
which arrive in any order before those of the next push; what has arrived arrives again at any time. A part is
damaged, or not valid; a commit is not of what was sent; a push is given up before, between and after its
parts; a stream ends between any two of them. The model is divided otherwise. What takes all this in is the
server's own `Pushes`, with its push ledger, streams and shard. After every step the oracle checks what
must always hold:

    E  every acknowledged push is applied exactly once, in the version that its outcome named. A duplicate
       gets the first outcome. The parameters are, bit for bit, those of mean and SGD on the applied log
    S  in stale mode no applied push is more clocks behind the newest one than the bound
    F  the parameters stay finite
    N  what is refused changes nothing but the lease of the worker it came from
    G  where scripts accumulate gradients, the samples of a step that an epoch's end cuts short are settled
       once, without a push; and what a push does not cover is given out anew
    M  what is remembered of a worker is bounded
    L  once faults stop, the job finishes; no sample of any epoch has been lost, none applied twice
    C  where members share samples, the weights of what is applied add up, for each sample and each slice, to
       its part of the mean: what slices and codes make of the pushes is the mean, and each sample is in one
    B  with `--overlap both`: a part is stepped as soon as all members that are not given up have stored it,
       and no slot is vacant, in rank order, and once. Each part of a push is in one version at most. Each
       sample counts once in each part after any loss, unless its step had no gradient, or no worker was left
       that had the version. A refused push is told which of its parts count, and no others count after that.
       It is redundant where another member was given its slot, and else stale. Updates make a replica equal
       to the server's parameters
    A  members of a round that is stepped in parts, or whose steps may begin early, are given what they were
       told to expect, if no member has come or gone
    D  a new plan may come at any time. It is put in force when no accepted push is of the old one and no part
       of the next version is stepped. No stored part outlives it. Each push counts under one plan
    P  the shard has every part of what it is to apply, and nothing but that and parts of pushes that are open
       and not unwanted

As a program it runs as many steps as it is told to, over all modes:

    python tests/server/histories.py --steps 10000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from world import World

from gradwire.proto.messages import Phase

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync overlap=both": {"overlap": "both"},
    "sync:backup=1": {"min_workers": 2},
    "sync:redundancy=2": {"min_workers": 2},
    "sync:redundancy=4": {},
    "sync:stragglers=1": {"min_workers": 2},
    "sync:stragglers=2": {"min_workers": 3},
    "stale:bound=0": {},
    "stale:bound=2": {},
    "async:rate=inverse": {},
    "async:compensation=0.1": {},
    "local:first=2,most=3": {},
    "local:first=2,most=3 overlap=both": {"overlap": "both"},
    "local:first=2,most=5,by=both": {},
    "local:first=2,most=3,delayed=on": {},
    # Scripts that accumulate gradients, and take any number of batches for a step.
    "sync accumulate": {"accumulates": True},
    "sync:backup=1 accumulate": {"accumulates": True, "min_workers": 2},
    "sync overlap=both accumulate": {"accumulates": True, "overlap": "both"},
    "sync:redundancy=2 accumulate": {"accumulates": True, "min_workers": 2},
    "stale:bound=2 accumulate": {"accumulates": True},
    "async:compensation=0.1 accumulate": {"accumulates": True},
    "local:first=2,most=3 accumulate": {"accumulates": True},
}


def run(mode: str, steps: int, seed: int) -> tuple[int, int]:
    """Run jobs until they have taken the given number of steps. Returns steps and pushes applied."""
    done = applied = epochs = evaluated = expected = 0
    while done < steps:
        seed += 1
        chance = random.Random(f"{mode}/{seed}")
        world = World(chance.randrange, mode, epochs=1 + chance.randrange(20), **MODES[mode])
        try:
            for _ in range(chance.randrange(3000)):
                world.act()
                if world.core.state.phase is Phase.FINISHED:
                    break
            world.finish()
        except AssertionError as error:
            raise AssertionError(f"mode {mode!r}, seed {seed}, step {world.steps}: {error}") from error
        done += world.steps
        applied += len(world.applied)
        epochs += world.epochs
        evaluated += len(world.core.state.evaluations.done)
        expected += world.came_as_expected
    assert evaluated > epochs / 2, (
        f"mode {mode!r}, from seed {seed}: only {evaluated} of {epochs} epochs evaluated"
    )
    tells = MODES[mode].get("overlap") == "both" or "delayed=on" in mode
    assert expected or not tells, f"mode {mode!r}, from seed {seed}: nobody was told what follows"
    return done, applied


def main() -> None:
    parser = argparse.ArgumentParser(description="Random histories of jobs, checked by an oracle.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for mode in MODES:
        started = time.perf_counter()
        steps, applied = run(mode, given.steps // len(MODES), given.seed)
        print(
            f"{mode}: {steps} steps, {applied} pushes applied, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
