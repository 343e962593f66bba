"""Files and exit code of a server that ends."""

from __future__ import annotations

import asyncio
import errno
import re
import signal
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire.common.exits import Exit
from gradwire.server import daemon
from gradwire.server.daemon import exit_code
from gradwire.server.durable.output import written
from gradwire.server.shard import writing

DOCS = Path(__file__).parents[2] / "docs"
TERM = signal.SIGTERM


async def test_a_finished_server_stays_for_the_scrape_that_shows_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "LINGER_S", 0.0)
    monkeypatch.setattr(daemon, "SCRAPED_S", 0.001)
    conductor: Any = SimpleNamespace(dispersed=lambda: asyncio.sleep(0))
    http: Any = SimpleNamespace(scrapes=2, next_scrape_s=3600.0)
    over = asyncio.create_task(daemon.linger(conductor, http))
    assert (await asyncio.wait({over}, timeout=0.1))[1] == {over}
    http.scrapes += 1
    await over
    stepped = daemon.linger(conductor, http)
    for _ in range(2):
        stepped.send(None)
    http.scrapes += 1  # while clients fetch the parameters
    with pytest.raises(StopIteration):
        stepped.send(None)
    http.next_scrape_s = 0.0  # not scraped regularly
    await daemon.linger(conductor, http)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ({"finished": True}, 0),
        ({"finished": True, "received": TERM}, 0),
        ({"received": TERM}, 143),
        ({"received": signal.SIGINT}, 130),
        ({"failed": True}, 1),
        ({"failed": True, "received": TERM}, 1),
        ({"failed": True, "diverged": True}, 7),
        ({"failed": True, "diverged": True, "unsaved": True}, 7),
        ({"finished": True, "unsaved": True, "received": TERM}, 8),
        ({"received": TERM, "unsaved": True}, 8),
        ({"finished": True, "failed": True}, 0),
    ],
)
def test_what_went_wrong_decides_the_exit_code(what: dict[str, bool], code: int) -> None:
    given = {
        "finished": False,
        "received": None,
        "failed": False,
        "diverged": False,
        "unsaved": False,
        **what,
    }
    assert exit_code(**given) == code  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_every_code_of_a_server_is_one_of_the_table_in_the_docs() -> None:
    table = (
        (DOCS / "reference" / "commands.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    )
    codes = {int(code) for line in re.findall(r"^\| ([\d, ]+) \|", table, re.M) for code in line.split(",")}
    assert codes == {code.value for code in Exit}
    either = (False, True)
    signals = (None, TERM, signal.SIGINT)
    for finished, received, failed, diverged, unsaved in product(either, signals, either, either, either):
        found = exit_code(
            finished=finished, received=received, failed=failed, diverged=diverged, unsaved=unsaved
        )
        assert found in codes


def test_parameters_that_do_not_fit_go_where_temporary_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, temporary = tmp_path / "full" / "model.safetensors", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    async def save(path: Path) -> None:
        if path == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text("saved")

    assert not asyncio.run(written(full, 7, save))
    assert (temporary / full.name).read_text() == "saved"
    assert "No space left on device" in caplog.text
    assert f"parameters of version 7 written to {temporary / full.name}" in caplog.text


def test_parameters_that_fit_nowhere_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))

    async def save(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert not asyncio.run(written(tmp_path / "model.safetensors", 7, save))


def test_the_same_parameters_make_the_same_file(tmp_path: Path) -> None:
    """The metadata's order in safetensors is random: one of six orders, each time."""
    names = ("embed.weight", 'a "quoted"\n\x7f name', "größe", "b")
    tensors = {name: torch.full((2, 3), float(number)) for number, name in enumerate(names)}
    path = tmp_path / "model.safetensors"
    files: set[bytes] = set()
    for _ in range(12):
        writing.write_model(path, tensors, version=3, digest="abc", finished=True)
        files.add(path.read_bytes())
    assert len(files) == 1
    found: dict[str, torch.Tensor] = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    reader: Any = safe_open(path, "pt")
    with reader as opened:
        assert opened.metadata() == {"version": "3", "sha256": "abc", "finished": "true"}


def test_a_file_that_is_not_whole_is_not_left_on_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.safetensors"
    model.write_text("an earlier one")

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        writing.write_model(model, {"a": torch.zeros(3)}, version=1, digest="", finished=True)
    assert [path.name for path in tmp_path.iterdir()] == [model.name]
    assert model.read_text() == "an earlier one"
