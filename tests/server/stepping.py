"""Steps of the state machine, as tests look at them: a refusal or a reply first, then the actions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from gradwire.proto.refusal import Refusal, Refused
from gradwire.server.job import events as e
from gradwire.server.job.core import Core
from gradwire.server.job.modes.registry import parse
from gradwire.settings import ServerSettings


@dataclass(frozen=True)
class Refuse:
    refusal: Refusal


@dataclass(frozen=True)
class Relay:
    """The reply to a packet that is to be handed on."""

    targets: tuple[str, ...]


def core_of(mode: str = "sync", **rules: Any) -> Core:
    """Make the core of a job; rules beside those that tests seldom care for."""
    fields: dict[str, Any] = {"min_workers": 1, "batch_size": 4, "epochs": 2, "lease_seconds": 10.0}
    return Core(ServerSettings(**{**fields, **rules}), parse(mode))


def step(core: Core, event: e.Event[Any], now: float) -> list[Any]:
    try:
        result = core.step(event, now)
    except Refused as refused:
        return [Refuse(refused.refusal)]
    answer: Any = result.reply
    reply = Relay(cast("tuple[str, ...]", answer)) if isinstance(answer, tuple) else answer
    return [*([] if reply is None else [reply]), *result.actions]


def state(core: Core) -> Any:
    """All that decides what happens next, but leases."""
    saved = core.save()
    roster = saved["job"]["roster"]
    for member in [*roster["members"].values(), *(each for _, each in roster["departed"]["$ordered"])]:
        del member["heard_at"]
    return saved


def written(core: Core) -> str:
    """The whole state as text."""
    return json.dumps(core.save())


def copied(core: Core, mode: str) -> Core:
    """A core that is made of what another one has written down."""
    copy = Core(core.state.rules, parse(mode))
    copy.load(json.loads(written(core)))
    assert written(copy) == written(core)
    return copy
