"""All that a server has between two versions, as a tree (`saved`), and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...compressors import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.plans import plan_message, plan_of
from ...proto.transfer import payload_header
from ..model_state import ModelState
from ..shard.shard import Image
from .recorder import Stored

if TYPE_CHECKING:
    from ..conductor import Conductor


def image_of(
    conductor: Conductor, manifest: Manifest, plan: Plan, shard: Image, state: ModelState
) -> dict[str, Any]:
    """shard: its image. The rest is as it is now: control has not heard of the version of that image yet."""
    return {
        "core": conductor.core.save(),
        "manifest": manifest.to_message(),
        "plan": plan_message(plan),
        "prepared": None if conductor.shard.prepared is None else plan_message(conductor.shard.prepared),
        "planner": conductor.plans.planner.terms,
        "shard": shard,
        "late": {key: sorted(parts) for key, parts in conductor.shard.late.items()},
        "arrivals": {name: each.image() for name, each in conductor.intake.all.items()},
        "state": state.image(),
        "metrics": conductor.metrics.image(),
        "now": conductor.now(),
        "times": conductor.times,
        "announced": True,
    }


def stored_of(conductor: Conductor) -> Iterator[Stored]:
    """Parts of open pushes, and of those that wait to be applied."""
    shard = conductor.shard
    for key, parts in shard.pushes.items():
        member = key.worker, key.incarnation
        arrivals = conductor.intake.of(*member)
        for number, payloads in parts.items():
            part = m.Part(
                seq=key.seq,
                assignment=arrivals.assignment(key.seq),
                part=number,
                plan=shard.plan.number,
                payloads=tuple(map(payload_header, payloads)),
                learning_rates=tuple(shard.rates(key)),
            )
            yield member, part, arrivals.checksum(key.seq, number), payloads


async def restore(conductor: Conductor, tree: Mapping[str, Any]) -> None:
    """Have a conductor that has just been made be as the one was of which this is the image."""
    message: m.Manifest = tree["manifest"]
    manifest = Manifest.from_message(message, worker="", max_bytes=conductor.core.rules.max_model_bytes)
    conductor.plans.planner.first(manifest, *tree["planner"])
    await conductor.shard.reopen(manifest, plan_of(tree["plan"], manifest), tree["shard"])
    if tree["prepared"] is not None:
        conductor.shard.prepare(plan_of(tree["prepared"], manifest))
    conductor.shard.counts(tree["late"])
    conductor.core.load(tree["core"])
    for name, image in tree["arrivals"].items():
        conductor.intake.of(*name).restore(image)
    conductor.state.restore(manifest.entries, tree["state"])
    conductor.metrics.restore(tree["metrics"])
    conductor.times = tree["times"]
