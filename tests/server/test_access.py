"""Admission of peers and tokens by a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.proto.refusal import Reason, Refused
from gradwire.server.calls.access import Access, TokenFileError, Tokens
from gradwire.settings import ServerSettings

ONE, OTHER = "0123456789abcdef", "fedcba9876543210"
REMOTE = "ipv4:10.0.0.7:4711"


def given(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_is_good_for_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# comment\n\n{ONE}\nw.1:{OTHER}\n")
    tokens = Tokens(path)
    assert tokens.owners(given(ONE)) == {""}
    assert tokens.owners(given(OTHER)) == {"w.1"}
    for wrong in (
        {},
        given(""),
        given(ONE[:-1]),
        given(ONE + "0"),
        given("w.1:" + OTHER),
        {"authorization": "\xff"},
    ):
        assert not tokens.owners(wrong)
    access = Access(ServerSettings(token_file=str(path)))
    access.check(given(OTHER), "w.1")
    access.check(given(ONE), "anybody")
    with pytest.raises(Refused) as refused:
        access.check(given(OTHER), "another")
    assert refused.value.refusal.reason is Reason.TOKEN
    assert OTHER not in str(refused.value)
    why = access.admit(given("x" * 16))
    assert why is not None
    assert "x" * 16 not in why.message


def test_an_id_with_a_line_of_its_own_takes_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    third, shared = "third" + ONE, "shared" + ONE
    path.write_text(f"{ONE}\nw0:{OTHER}\nw1:{third}\nw1:{shared}\nw2:{shared}\n")
    access = Access(ServerSettings(token_file=str(path)))
    good = {("w0", OTHER), ("w1", third), ("w1", shared), ("w2", shared), ("w3", ONE), ("W0", ONE)}
    for worker in ("w0", "w1", "w2", "w3", "W0"):
        for token in (ONE, OTHER, third, shared):
            if (worker, token) in good:
                access.check(given(token), worker)
                continue
            with pytest.raises(Refused) as refused:
                access.check(given(token), worker)
            assert refused.value.refusal.reason is Reason.TOKEN
            assert "--token-file" in refused.value.refusal.remedy
            assert token not in str(refused.value)
    path.write_text(f"{ONE}\n")  # the line is gone, and with it what it bound
    access.check(given(ONE), "w0")


def test_a_file_is_read_again_when_it_changes_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text(ONE)
    tokens = Tokens(path)
    path.write_text("")
    assert tokens.owners(given(ONE))
    path.write_text(OTHER + "0")
    assert not tokens.owners(given(ONE))
    assert tokens.owners(given(OTHER + "0"))
    path.unlink()
    caplog.clear()
    assert tokens.owners(given(OTHER + "0"))
    assert tokens.owners(given(OTHER + "0"))
    (line,) = caplog.records  # not one for every call
    assert line.levelname == "ERROR"
    assert "cannot be read: " in line.getMessage()
    for text in ("", "# nothing", "short", f"../w:{ONE}", f":{ONE}", f"a b{ONE}", f"{ONE}é", f"w:{ONE} x"):
        path.write_text(text)
        with pytest.raises(TokenFileError):
            Tokens(path)


@pytest.mark.parametrize(
    ("options", "remote"),
    [
        ({}, False),
        ({"insecure": True}, True),
        ({"token_file": "tokens"}, False),  # it would travel in the clear
        ({"token_file": "tokens", "insecure": True}, True),
        ({"tls_cert": "c", "tls_key": "k"}, False),  # encrypted, for everybody
        ({"tls_cert": "c", "tls_key": "k", "token_file": "tokens"}, True),
        ({"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}, True),
    ],
)
def test_remote_peers_are_answered_where_they_are_known_and_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], remote: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").write_text(ONE)
    access = Access(ServerSettings(**options))  # type: ignore[arg-type]
    assert access.remote is remote
    access.check_peer("ipv4:127.0.0.1:1")
    if remote:
        access.check_peer(REMOTE)
        return
    with pytest.raises(Refused, match="--tls-cert") as refused:
        access.check_peer(REMOTE)
    assert refused.value.refusal.reason is Reason.PROTECTED
