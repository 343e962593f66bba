"""Certificates that are replaced while a server runs: files that cannot serve are named, and not used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest

from gradwire.deploy import certs
from gradwire.proto.certificates import CertificateError, Certificates, Identity


class Past(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=30)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with certificates for 99 days, for 3 days, and expired ones."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, days in (("good", "99"), ("other", "99"), ("soon", "3")):
        assert certs.main([str(folder / name), "--host", "127.0.0.1", "--days", days]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "datetime", Past)
        assert certs.main([str(folder / "expired"), "--host", "127.0.0.1", "--days", "7"]) == 0
    return folder


@pytest.fixture
def used(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "good", tmp_path / "used")
    return tmp_path / "used"


def certificates(folder: Path) -> Certificates:
    server = str(folder / "server")
    return Certificates(Identity(cert=f"{server}.pem", key=f"{server}.key", ca=str(folder / "ca.pem")))


def both(name: str) -> Callable[[Path, Path], None]:
    def replace(made: Path, used: Path) -> None:
        for file in ("server.pem", "server.key"):
            shutil.copy(made / name / file, used / file)

    return replace


FAULTS: list[tuple[Callable[[Path, Path], object], str]] = [
    (both("expired"), r"--tls-cert \S+server\.pem: has expired, 20\d\d-\d\d-\d\d \d\d:\d\d UTC; renew it"),
    (
        lambda made, used: shutil.copy(made / "other" / "server.key", used / "server.key"),
        r"--tls-cert \S+server\.pem and --tls-key \S+server\.key: cannot be used together: .*mismatch",
    ),
    (
        lambda made, used: (used / "server.pem").write_text("nonsense"),
        r"--tls-cert \S+server\.pem: no certificate in PEM",
    ),
    (lambda made, used: (used / "server.key").unlink(), r"--tls-key \S+: cannot be read: No such file"),
    (lambda made, used: (used / "ca.pem").unlink(), r"--tls-ca \S+: cannot be read: No such file"),
    (lambda made, used: (used / "ca.pem").write_text("nonsense"), r"--tls-ca \S+: no certificates in PEM"),
]


@pytest.mark.parametrize(("spoil", "words"), FAULTS)
def test_files_that_cannot_serve_are_named_once_and_the_last_good_ones_stay(
    made: Path,
    used: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, Path], object],
    words: str,
) -> None:
    found = certificates(used)
    before = found.contents, found.expires_at
    spoil(made, used)
    assert not found.renewed()
    assert not found.renewed()
    assert (found.contents, found.expires_at) == before
    assert found.failing == ""
    (line,) = caplog.records
    assert line.levelname == "ERROR"
    assert line.getMessage().endswith("; the files that were read before stay in force")
    with pytest.raises(CertificateError, match=words) as refused:
        certificates(used)
    assert str(refused.value) in line.getMessage()
    shutil.copytree(made / "other", used, dirs_exist_ok=True)
    assert found.renewed()
    assert found.contents[1] == (made / "other" / "server.pem").read_bytes()


def test_a_certificate_is_named_before_it_expires_and_after(
    made: Path, used: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    both("soon")(made, used)
    found = certificates(used)
    found.renewed()
    found.renewed()
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert "server.pem: expires in 2 days, 20" in line.getMessage()
    monkeypatch.setattr("time.time", lambda: found.expires_at + 1)
    assert "server.pem: has expired, 20" in found.failing
    found.renewed()
    assert "has expired" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("; no client can connect until then")


def test_the_dates_are_those_of_the_certificate(made: Path) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((made / "good" / "server.pem").read_bytes())
    assert certificates(made / "good").expires_at == certificate.not_valid_after_utc.timestamp()
