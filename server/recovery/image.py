"""The state of a server between two versions, as a tree (`storage.values`), and its restoration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.parts import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.plans import plan_message, plan_of
from ..conductor import Conductor
from ..shard.model_state import ModelState
from ..shard.shard import Image


def image_of(
    conductor: Conductor, manifest: Manifest, plan: Plan, shard: Image, state: ModelState
) -> dict[str, Any]:
    """Return the whole state of the server as a tree, to be written as a checkpoint.

    Args:
        conductor: conductor whose present state is taken.
        shard: image of the shard, at a version of which the conductor has not been told yet.
        state: frozen parameters and buffers of the model.
    """
    return {
        "core": conductor.core.save(),
        "manifest": manifest.to_message(),
        "plan": plan_message(plan),
        "prepared": None if conductor.plans.prepared is None else plan_message(conductor.plans.prepared),
        "planner": conductor.plans.planner.terms,
        "shard": shard,
        "pushes": conductor.ledger.image(),
        "state": state.image(),
        "metrics": conductor.metrics.image(),
        "now": conductor.now(),
        "times": (conductor.started_at, conductor.ended_at),
        "announced": True,
    }


async def restore(conductor: Conductor, tree: Mapping[str, Any]) -> None:
    """Load the state in a tree that `image_of` returned into a conductor that has just been created."""
    message: m.ModelManifest = tree["manifest"]
    manifest = Manifest.from_message(message, worker="", max_bytes=conductor.core.state.rules.max_model_bytes)
    conductor.plans.planner.first(manifest, *tree["planner"])
    await conductor.shard.open(manifest, tree["shard"], plan_of(tree["plan"], manifest), lambda: None)
    if tree["prepared"] is not None:
        conductor.plans.prepare(plan_of(tree["prepared"], manifest))
    conductor.core.load(tree["core"])
    conductor.ledger.restore(tree["pushes"])
    conductor.state.restore(manifest.entries, tree["state"])
    conductor.metrics.restore(tree["metrics"])
    conductor.started_at, conductor.ended_at = tree["times"]
