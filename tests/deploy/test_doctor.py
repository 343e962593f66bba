"""gc-doctor: what it says of servers that are well, and of each that is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from http2_proxy import proxy

from gradwire import __version__
from gradwire.common.exits import Exit
from gradwire.deploy import plan, service_checks, watch
from gradwire.deploy.doctor import examine, main
from gradwire.deploy.status import connected
from gradwire.proto import messages as m
from gradwire.proto.channel import SERVER_OPTIONS
from gradwire.proto.findings import Finding, Target
from gradwire.proto.job import job_message
from gradwire.proto.reaching import EXPIRES_SOON_S
from gradwire.proto.refusal import Reason
from gradwire.proto.service import SERVICE, abort, generic_handler
from gradwire.proto.wire import PROBE_BYTES
from gradwire.settings import JobTerms

JOB = job_message(JobTerms(id="j", work="gradients"))
Status = Callable[[m.StatusRequest, Any], Any]


async def well(request: m.StatusRequest, context: Any, ahead_s: float = 0.0) -> m.StatusResponse:
    return m.StatusResponse(
        job=JOB, phase=m.Phase.RUNNING, waiting="", version=0, epoch=0, epoch_progress=0.0, members=(),
        lost=(), evaluations=(), traffic=m.Traffic(), pushes=0, refused_pushes=0, train_loss=0.0,
        training_seconds=0.0, parameters_sha256="", software=__version__, unix_seconds=time.time() + ahead_s,
        padding=request.padding if request.echo else b"",
    )  # fmt: skip


@contextlib.contextmanager
def serving(status: Status | None = well, credentials: Any = None) -> Generator[int]:
    """A server of which nothing works but `Status`; None: it is of another program. Its port."""
    ports: list[int] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        if status is not None:
            handlers: dict[str, Any] = dict.fromkeys((each.name for each in SERVICE.methods), status)
            handler = generic_handler(handlers, sent=lambda _: None, received=lambda _: None)
            server.add_generic_rpc_handlers((handler,))
        where = "127.0.0.1:0"
        ports.append(
            server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
        )
        await server.start()
        ready.set()
        await asyncio.to_thread(over.wait)
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    try:
        yield ports[0]
    finally:
        over.set()
        thread.join(20)


def findings(port: int, host: str = "127.0.0.1", **files: str) -> dict[str, Finding]:
    return {each.check: each for each in examine(Target(host=host, port=port, **files))}


def wrong(port: int, host: str = "127.0.0.1", **files: str) -> Finding:
    """The last one, which is wrong; those before it are not."""
    *before, last = findings(port, host, **files).values()
    assert all(each.state == "ok" for each in before), before
    assert last.state == "wrong"
    assert last.remedy
    return last


# ---- all is well


def test_a_server_that_is_well_is_measured() -> None:
    with serving() as port:
        found = findings(port)
    checks = ["name", "port", "tls", "version", "access", "round trip", "clock", "bandwidth", "large call"]
    assert list(found) == checks
    assert all(each.state == "ok" for each in found.values()), found
    assert "not encrypted" in found["tls"].text
    assert __version__ in found["version"].text
    assert "Mbit/s" in found["bandwidth"].text


def test_lines_json_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as port:
        assert main([f"127.0.0.1:{port}"]) == Exit.DONE
        lines = capsys.readouterr().out.splitlines()
        assert main([f"127.0.0.1:{port}", "--json"]) == Exit.DONE
        told = json.loads(capsys.readouterr().out)
    assert [line.split()[:2] for line in lines[:3]] == [["ok", "name"], ["ok", "port"], ["ok", "tls"]]
    assert len(lines) == len(told["findings"]) == 9
    assert told["usable"] is True
    assert main([f"127.0.0.1:{port}", "--json"]) == Exit.UNREACHABLE
    told = json.loads(capsys.readouterr().out)
    assert (told["usable"], told["findings"][-1]["check"]) == (False, "port")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("localhost", "--tls-ca", "/no/such/file"), "--tls-ca /no/such/file: expected a file that exists"),
        (("localhost", "--tls-cert", __file__), "expected both or neither"),
    ],
)
def test_files_that_cannot_be_meant(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == Exit.USAGE
    assert words in capsys.readouterr().err


def test_the_server_is_the_workers_if_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GC_SERVER", "127.0.0.1:1")
    assert main([]) == Exit.UNREACHABLE
    assert "port 1: Connection refused" in capsys.readouterr().out


# ---- it cannot be reached


def test_a_name_that_is_not_found() -> None:
    found = wrong(50051, "no-such-host.invalid")
    assert (found.check, found.unreachable) == ("name", True)
    assert "'no-such-host.invalid' is not found" in found.text


def test_nothing_listens() -> None:
    found = wrong(1)
    assert (found.check, found.unreachable) == ("port", True)
    assert "Connection refused" in found.text
    assert "is gc-server running" in found.remedy


@contextlib.contextmanager
def saying(what: bytes) -> Generator[int]:
    """A program that says so to whoever connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    with accepted:
                        accepted.recv(1024)
                        accepted.sendall(what)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("what", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_another_program_listens(what: bytes) -> None:
    with saying(what) as port:
        found = wrong(port)
    assert (found.check, found.unreachable) == ("tls", True)
    assert "another program" in found.remedy


# ---- it refuses


def test_a_grpc_server_that_is_none_of_ours_or_of_another_version() -> None:
    with serving(None) as port:
        found = wrong(port)
    assert (found.check, found.unreachable) == ("version", False)
    assert SERVICE.full_name.rpartition(".")[0] in found.text
    assert "same release" in found.text + found.remedy


def test_another_release_of_the_same_protocol_is_a_warning() -> None:
    async def older(request: m.StatusRequest, context: Any) -> m.StatusResponse:
        import dataclasses

        return dataclasses.replace(await well(request, context), software="0.0.1")

    with serving(older) as port:
        found = findings(port)
    assert found["version"].state == "warning"
    assert "0.0.1 there" in found["version"].text
    assert found["bandwidth"].state == "ok"


def test_a_clock_that_is_wrong_is_a_warning() -> None:
    async def ahead(request: m.StatusRequest, context: Any) -> m.StatusResponse:
        return await well(request, context, 3600.0)

    with serving(ahead) as port:
        found = findings(port)["clock"]
    assert found.state == "warning"
    assert "3600" in found.text or "3599" in found.text
    assert "ahead" in found.text
    assert "NTP" in found.remedy


@pytest.mark.parametrize(
    ("status", "words", "unreachable"),
    [
        (404, "pass every path", False),
        (413, "client_max_body_size 0", False),
        (502, "is gc-server running behind it", True),
        (504, "grpc_read_timeout 1h", True),
    ],
)
def test_a_proxy_in_front_of_the_server_is_named_with_its_status(
    status: int, words: str, unreachable: bool
) -> None:
    with proxy(lambda _: status) as port:
        found = wrong(port)
    assert (found.check, found.unreachable) == ("proxy", unreachable)
    assert f"HTTP status {status}" in found.text
    assert words in found.remedy


def test_a_proxy_that_refuses_large_requests_is_found_by_a_large_call() -> None:
    """nginx admits 1 MiB unless told otherwise: every check passed, and no model was uploaded."""
    with serving() as port, proxy(lambda size: 413 if size > 1 << 20 else 200) as front:
        call: Any = vars(service_checks)["_large_call"]
        with connected(Target(host="127.0.0.1", port=front)) as through:
            found: Finding = call(through)
        with connected(Target(host="127.0.0.1", port=port)) as direct:
            assert call(direct).state == "ok"
    assert (found.check, found.state, found.unreachable) == ("proxy", "wrong", False)
    assert "client_max_body_size" in found.remedy


def test_protected_mode_is_said_in_the_servers_words() -> None:
    async def protected(request: Any, context: Any) -> None:
        refusal = m.Refusal(
            reason=Reason.PROTECTED, message="only peers here", remedy="start it with --insecure"
        )
        await abort(context, refusal)

    with serving(protected) as port:
        found = wrong(port)
    assert (found.check, found.unreachable) == ("access", False)
    assert "--insecure" in found.text + found.remedy


def test_a_server_that_wants_a_token_gets_that_of_the_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")

    async def asking(request: m.StatusRequest, context: Any) -> Any:
        given = dict(context.invocation_metadata()).get("authorization")
        if given != "Bearer s3cret":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return await well(request, context)

    with serving(asking) as port:
        without = wrong(port)
        found = findings(port, token_file=str(token))
        token.write_text("another")
        other = wrong(port, token_file=str(token))
    assert (without.check, without.text) == ("access", "no token")
    assert "--token-file" in without.remedy
    assert found["access"].state == found["bandwidth"].state == "ok"
    assert "of this worker" in other.remedy
    assert "another" not in other.text + other.remedy


def test_no_more_goes_down_than_was_sent_up_and_little_of_that() -> None:
    lengths: list[tuple[int, bool]] = []

    async def counting(request: m.StatusRequest, context: Any) -> m.StatusResponse:
        lengths.append((len(request.padding), request.echo))
        return await well(request, context)

    with serving(counting) as port:
        findings(port)
    assert all(length or not echo for length, echo in lengths)
    assert max(length for length, echo in lengths if echo) <= 1 << 19
    assert sum(length for length, _ in lengths) == 2 * sum(service_checks.PADDING_BYTES) + PROBE_BYTES


# ---- TLS


openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


class Certificates:
    """Certificate files of an authority, a server, a worker, and of another authority."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("ca", "other"):
            self._make(name, "-days", "99", "-addext", "basicConstraints=critical,CA:TRUE")
        signed = ("-CA", self["ca"], "-CAkey", self.key("ca"), "-addext", "subjectAltName=IP:127.0.0.1")
        self._make("server", "-days", "99", *signed)
        self._make("soon", "-days", "3", *signed)
        self._make("worker", "-days", "99", *signed)
        self._make("elsewhere", "-days", "99", *signed[:-1], "subjectAltName=DNS:elsewhere")

    def _make(self, name: str, *more: str) -> None:
        made = ("-keyout", self.key(name), "-out", self[name], "-subj", f"/CN={name}")
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        subprocess.run(("openssl", "req", "-x509", *kind, *made, *more), check=True, capture_output=True)

    def __getitem__(self, name: str) -> str:
        return str(self._folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return str(self._folder / f"{name}.key")

    def of(self, name: str, *, mutual: bool = False) -> Any:
        untyped: Any = grpc
        pair = (Path(self.key(name)).read_bytes(), Path(self[name]).read_bytes())
        root = Path(self["ca"]).read_bytes() if mutual else None
        return untyped.ssl_server_credentials((pair,), root, mutual)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@openssl
def test_tls_with_a_certificate_of_each_side(certificates: Certificates) -> None:
    mine = {"tls_cert": certificates["worker"], "tls_key": certificates.key("worker")}
    with serving(credentials=certificates.of("server", mutual=True)) as port:
        found = findings(port, tls_ca=certificates["ca"], **mine)
        without = wrong(port, tls_ca=certificates["ca"])
    assert all(each.state == "ok" for each in found.values()), found
    assert "TLSv1" in found["tls"].text
    assert "valid for 98 days" in found["tls"].text or "valid for 99 days" in found["tls"].text
    assert "bandwidth" in found
    assert without.check == "tls"
    assert "wants a certificate of the worker" in without.text
    assert "--tls-cert" in without.remedy


@openssl
@pytest.mark.parametrize("host", ["elsewhere", "elsewhere."])
def test_the_certificate_is_that_of_the_name_and_not_of_its_address(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Only the system's resolver knows the name; the final dot of DNS is in no certificate."""
    resolve: Any = socket.getaddrinfo

    def resolve_all(name: str, *more: Any, **named: Any) -> Any:
        return resolve("127.0.0.1", *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_all)
    with serving(credentials=certificates.of("elsewhere")) as port:
        found = findings(port, host, tls_ca=certificates["ca"])
    assert all(each.state == "ok" for each in found.values()), found
    assert "bandwidth" in found


@openssl
def test_a_certificate_that_expires_soon_is_a_warning(certificates: Certificates) -> None:
    assert EXPIRES_SOON_S > 3 * 86400
    with serving(credentials=certificates.of("soon")) as port:
        found = findings(port, tls_ca=certificates["ca"])
    assert found["tls"].state == "warning"
    assert found["bandwidth"].state == "ok"


@openssl
@pytest.mark.parametrize(
    ("server", "ca", "remedy"),
    [
        ("server", "other", "set --tls-ca to the authority"),
        ("elsewhere", "ca", "a name in the server's certificate"),
    ],
)
def test_a_certificate_that_is_not_accepted(
    server: str, ca: str, remedy: str, certificates: Certificates
) -> None:
    with serving(credentials=certificates.of(server)) as port:
        found = wrong(port, tls_ca=certificates[ca])
    assert found.check == "tls"
    assert "certificate is not accepted" in found.text
    assert remedy in found.remedy


@openssl
def test_tls_on_one_side_alone(certificates: Certificates) -> None:
    with serving(credentials=certificates.of("server")) as port:
        found = wrong(port)
    assert (found.check, found.unreachable) == ("tls", False)
    assert "the server speaks TLS" in found.text
    assert "--tls-ca" in found.remedy
    with serving() as port:
        found = wrong(port, tls_ca=certificates["ca"])
    assert found.text == "the server does not speak TLS"
    assert "leave out --tls-ca" in found.remedy


@openssl
def test_status_and_plan_say_why_a_server_does_not_answer(
    certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    """The messages are those of gc-doctor, for TLS without an authority, for another authority, and for a
    closed port."""
    with serving(credentials=certificates.of("server")) as port:
        assert watch.main([f"127.0.0.1:{port}"]) == Exit.REFUSED
        said = capsys.readouterr().err
        assert "the server speaks TLS, and no file was given; add --tls-ca FILE" in said
        assert plan.main(["--server", f"127.0.0.1:{port}"]) == Exit.USAGE
        assert "the server speaks TLS" in capsys.readouterr().err
        assert watch.main([f"127.0.0.1:{port}", "--tls-ca", certificates["ca"]]) == Exit.DONE
        assert watch.main([f"127.0.0.1:{port}", "--tls-ca", certificates["other"]]) == Exit.REFUSED
        assert "set --tls-ca to the authority" in capsys.readouterr().err
    assert watch.main([f"127.0.0.1:{port}"]) == Exit.UNREACHABLE
    assert "nothing listens there" in capsys.readouterr().err


@openssl
def test_files_that_are_no_certificates(tmp_path: Path, certificates: Certificates) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    with serving(credentials=certificates.of("server")) as port:
        found = wrong(port, tls_ca=str(nonsense))
        mixed = wrong(
            port, tls_ca=certificates["ca"], tls_cert=certificates["worker"], tls_key=certificates.key("ca")
        )
    for each in (found, mixed):
        assert each.check == "tls"
        assert "cannot use the TLS files" in each.text


def test_an_expired_certificate_names_the_clocks() -> None:
    from gradwire.proto.reaching import _remedy  # pyright: ignore[reportPrivateUsage]

    error = ssl.SSLCertVerificationError(1, "")
    error.verify_message = "certificate has expired"
    assert "renew" in _remedy(error)
    assert "clocks" in _remedy(error)
