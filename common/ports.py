"""Ports that this process listens on, told to the process that has started it, if that is gc-run."""

from __future__ import annotations

from collections.abc import Callable


def _ignore(name: str, port: int) -> None: ...


announce: Callable[[str, int], None] = _ignore  # `deploy/child` replaces it; the name is grpc or http
