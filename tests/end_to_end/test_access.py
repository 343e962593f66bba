"""Admission to a server: TLS, certificates of workers, tokens, and the messages of refusals."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import threading
import time
import urllib.request
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
from daemons import Daemon, Daemons, Server, poll

from gradwire.common.exits import Exit
from gradwire.deploy import certs, watch

TOKEN, BOUND = "a-token-for-everybody-0123456789", "a-token-for-w1-alone-0123456789"
TASK = "small_tasks:regression:slow=0.05,samples=19200"
BOUND_S = 15.0


class Past(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=30)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities, some of which have expired, and tokens."""
    folder = tmp_path_factory.mktemp("access")
    for name in ("ours", "theirs"):
        assert certs.main([str(folder / name), "--host", "127.0.0.1", "--client", "w"]) == 0
    # Of our authority, but issued long ago.
    (folder / "expired").mkdir()
    for name in ("ca.pem", "ca.key"):
        shutil.copy(folder / "ours" / name, folder / "expired" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "datetime", Past)
        host = ("--host", "127.0.0.1", "--client", "w", "--days", "7")
        assert certs.main([str(folder / "expired"), *host]) == 0
    (folder / "tokens").write_text(f"# of the job\n{TOKEN}\nw1:{BOUND}\n")
    for name, token in (("token", TOKEN), ("bound", BOUND), ("wrong", "x" * 32), ("odd", "\x1bé" * 16)):
        (folder / name).write_text(token + "\n")
    return folder


def shown(files: Path, by: str = "ours") -> tuple[str, ...]:
    folder = files / by
    return ("--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key"))


def own(files: Path, by: str = "ours") -> tuple[str, ...]:
    return ("--tls-cert", str(files / by / "w.pem"), "--tls-key", str(files / by / "w.key"))


def ca(files: Path, of: str = "ours") -> tuple[str, ...]:
    return ("--tls-ca", str(files / of / "ca.pem"))


def token(files: Path, name: str = "token") -> tuple[str, ...]:
    return ("--token-file", str(files / name))


@pytest.fixture
def guarded(daemons: Daemons, files: Path) -> Server:
    """A server that wants a certificate and a token."""
    return daemons.server(
        *("--task", TASK, "--epochs", "1"), *shown(files), *ca(files), *token(files, "tokens")
    )


def test_who_shows_all_that_is_wanted_takes_part_and_others_are_told_why_not(
    daemons: Daemons, guarded: Server, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = daemons.worker(guarded.address, "--worker-id", "w0", *ca(files), *own(files), *token(files))
    worker.wait_for("ready for work")
    refused: list[tuple[str, Daemon, str]] = []
    for name, arguments, why in (
        (
            "plaintext",
            token(files),
            "the server speaks TLS, and no file was given; add --tls-ca FILE",
        ),
        ("without a certificate", (*ca(files), *token(files)), "add --tls-cert and --tls-key"),
        (
            "another authority",
            (*ca(files, "theirs"), *own(files), *token(files)),
            "set --tls-ca to the authority",
        ),
        (
            "a foreign certificate",
            (*ca(files), *own(files, "theirs"), *token(files)),
            "refuses this worker's certificate",
        ),
        (
            "an expired certificate",
            (*ca(files), *own(files, "expired"), *token(files)),
            "use a valid certificate, issued by the authority that the server was started with",
        ),
        ("no token", (*ca(files), *own(files)), "--token-file FILE"),
        ("a wrong token", (*ca(files), *own(files), *token(files, "wrong")), "an unknown one"),
        (
            "a token that no call can carry",
            (*ca(files), *own(files), *token(files, "odd")),
            "printable ASCII",
        ),
        ("another's token", (*ca(files), *own(files), *token(files, "bound")), "a token of another worker"),
    ):
        refused.append((name, daemons.worker(guarded.address, "--worker-id", "w2", *arguments), why))
    general = daemons.worker(guarded.address, "--worker-id", "w1", *ca(files), *own(files), *token(files))
    refused.append(
        ("everybody's token for an id that is bound", general, "a token that is bound to no worker")
    )
    began = time.monotonic()
    for name, daemon, why in refused:
        assert daemon.wait() in (Exit.REFUSED, Exit.UNREACHABLE), (name, daemon.log)
        assert why in daemon.log, (name, daemon.log)
    assert time.monotonic() - began < 3 * BOUND_S  # eight at once on a busy machine
    bound = daemons.worker(
        guarded.address, "--worker-id", "w1", *ca(files), *own(files), *token(files, "bound")
    )
    bound.wait_for("ready for work")
    access = [*ca(files), *own(files), *token(files)]
    assert watch.main([guarded.address, "--json", *access]) == 0
    assert '"w0"' in capsys.readouterr().out
    assert watch.main([guarded.address, "--json", *access[:-2]]) == Exit.REFUSED
    for daemon in (guarded, worker, bound, *(each for _, each, _ in refused)):
        assert not any(secret in daemon.log for secret in (TOKEN, BOUND, "x" * 32))


def test_files_that_are_replaced_count_from_the_next_connection_and_nothing_is_dropped(
    daemons: Daemons, files: Path, tmp_path: Path
) -> None:
    used = tmp_path / "used"
    shutil.copytree(files / "ours", used / "ours")
    shutil.copy(files / "tokens", used / "tokens")
    server = daemons.server(
        *("--task", TASK, "--epochs", "1", "--http-port", "0"), *shown(used), *token(used, "tokens")
    )
    before = daemons.worker(server.address, "--worker-id", "w0", *ca(files), *token(files))
    before.wait_for("ready for work")
    port = server.wait_for(r"metrics and probes on port (\d+)").group(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        found = re.search(
            r"^gradwire_server_certificate_expiry_seconds\S* (\S+)$", response.read().decode(), re.M
        )
    assert found
    assert float(found[1]) == pytest.approx(time.time() + certs.DAYS * 86400, abs=3600)
    (used / "new tokens").write_text("a-newer-token-for-everybody-0123\n")
    os.replace(used / "new tokens", used / "tokens")
    for name in ("server.key", "server.pem"):
        shutil.copy(files / "theirs" / name, used / f"new {name}")
        os.replace(used / f"new {name}", used / "ours" / name)
    (tmp_path / "token").write_text("a-newer-token-for-everybody-0123")
    after = daemons.worker(
        server.address, "--worker-id", "w1", *ca(files, "theirs"), "--token-file", str(tmp_path / "token")
    )
    after.wait_for("ready for work")
    old = daemons.worker(server.address, "--worker-id", "w2", *ca(files), *token(files))
    assert old.wait() in (Exit.REFUSED, Exit.UNREACHABLE)
    poll(lambda: "is lost" not in server.log and "joined" in server.log, "a member was lost")
    assert "connection" not in before.log


def test_tls_to_a_server_without_it_ends_with_a_remedy(daemons: Daemons, files: Path) -> None:
    server = daemons.server("--task", TASK)
    worker = daemons.worker(server.address, *ca(files))
    assert worker.wait() == Exit.UNREACHABLE
    assert "the server does not speak TLS; start gc-server with --tls-cert and --tls-key" in worker.log


def test_a_server_whose_certificate_has_expired_is_not_waited_for(daemons: Daemons, files: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "expired" / "server.pem", files / "expired" / "server.key")

    def shake_hands(connected: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(connected, server_side=True):
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=shake_hands, args=listener.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        worker = daemons.worker(f"127.0.0.1:{listener.getsockname()[1]}", *ca(files), *token(files))
        assert worker.wait() == Exit.UNREACHABLE
        listener.shutdown(socket.SHUT_RDWR)
    assert "expired" in worker.log


def test_a_server_does_not_start_with_a_certificate_that_cannot_serve(daemons: Daemons, files: Path) -> None:
    server = daemons.plain("gradwire.server.cli", "--port", "0", *shown(files, "expired"))
    assert server.wait() == Exit.USAGE
    assert "server.pem: has expired, 20" in server.log


def test_a_token_file_that_is_none_is_refused_without_a_word_of_it(daemons: Daemons, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("short\n")
    daemon = daemons.plain("gradwire.server.cli", "--port", "0", "--token-file", str(tmp_path / "tokens"))
    assert daemon.wait() == Exit.USAGE
    assert "line 1: expected a token of at least 16 characters" in daemon.log
    assert "short" not in daemon.log
    daemon = daemons.plain("gradwire.server.cli", "--port", "0", "--tls-cert", str(tmp_path / "none.pem"))
    assert daemon.wait() == Exit.USAGE
    assert "--tls-cert, --tls-key: expected both" in daemon.log


def test_certificates_are_not_overwritten_and_keys_are_their_owners(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs.main([str(files / "ours"), "--host", "else"]) == Exit.USAGE
    assert "exists already" in capsys.readouterr().err
    for name in ("ca", "server", "w"):
        assert (files / "ours" / f"{name}.key").stat().st_mode & 0o777 == 0o600
    assert certs.main([str(files / "ours"), "--client", "another"]) == 0  # of the same authority
