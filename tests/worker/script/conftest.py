"""A script that is connected to a server of `looping`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from looping import Connect, Server

import gradwire
from gradwire.common.addresses import parse_address
from gradwire.settings import WorkerSettings
from gradwire.worker.script import membership


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    jobs: list[gradwire.Job] = []

    def make(of: Server | None = None, **given: Any) -> tuple[Server, gradwire.Job]:
        """Connect a script to a server. of: an existing server. given: options of the script then, and
        otherwise terms of the job."""
        server = of if of is not None else Server(**given)
        options: dict[str, Any] = given if of is not None else {}

        def connection_of(settings: WorkerSettings, metrics: object) -> Server:
            server.address = parse_address(settings.server)
            return server

        monkeypatch.setattr(membership, "connection_of", connection_of)
        if "MASTER_ADDR" not in os.environ:
            options = {"server": "localhost", **options}
        given_terms: dict[str, Any] = {"compressor": "none", **options}
        job = gradwire.connect(**given_terms)
        driver = job._driver  # pyright: ignore
        begin = driver.begin

        def begun(*given: Any) -> Any:
            found = begin(*given)
            server.follow(job)
            return found

        monkeypatch.setattr(driver, "begin", begun)
        jobs.append(job)
        return server, job

    yield make
    for job in jobs:
        job.leave()
