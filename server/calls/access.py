"""Access to this server: tokens, and the peers that it answers."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.naming import NAME_RULE, why_no_name, why_no_token
from ...proto.channel import AUTHORIZATION
from ...proto.refusal import Reason, Refusal, refusal, refused
from ...settings import ServerSettings

log = logging.getLogger("gradwire.server")

LEAST_TOKEN_CHARACTERS = 16
REMEDY = (
    "start it with --token-file FILE, which has a token of this job; if a line of the server's file names "
    "this worker, the token of that line"
)
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "unix:")


class TokenFileError(ValueError):
    """The file of --token-file is none. The message never has a token in it."""


class Tokens:
    """The tokens of a file. Read again when it has changed. Belongs to one event loop.

    A line is `WORKER-ID:TOKEN`, by which the id is *bound*: this token is good for it alone, and no other
    token is good for it, unless another line binds it too. Or it is `TOKEN`, good for every id that is not
    bound. Lines that begin with # say nothing.
    """

    def __init__(self, path: Path) -> None:
        """Raises TokenFileError."""
        self._path = path
        self._changed_at = 0
        self._known: list[tuple[str, bytes]] = []
        self._read()

    def _read(self) -> None:
        try:
            changed_at = self._path.stat().st_mtime_ns
            if changed_at == self._changed_at:
                return
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenFileError(f"--token-file {self._path}: cannot be read: {error}") from None
        known: list[tuple[str, bytes]] = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            worker, colon, token = line.strip().rpartition(":")
            if len(token) < LEAST_TOKEN_CHARACTERS:
                raise TokenFileError(
                    f"--token-file {self._path}, line {number}: expected a token of at least "
                    f"{LEAST_TOKEN_CHARACTERS} characters, or WORKER-ID:TOKEN; openssl rand -hex 32 makes one"
                )
            why = why_no_token(token)
            if not why and colon and why_no_name(worker):  # and may be half of a token
                why = f"a WORKER-ID before the colon: expected {NAME_RULE}"
            if why:
                raise TokenFileError(f"--token-file {self._path}, line {number}: {why}")
            known.append((worker, token.encode()))
        if not known:
            raise TokenFileError(f"--token-file {self._path}: expected a token on a line, got none")
        self._known, self._changed_at = known, changed_at

    def owners(self, metadata: Mapping[str, Any]) -> frozenset[str]:
        """Return the ids that a call's token is bound to, and "" if a line has it without an id. Empty for a
        call without a token, or with another one."""
        try:
            self._read()
        except TokenFileError as error:  # half written, or gone: what was read before holds
            log.warning("%s; the tokens that were read before stay good", error)
        given = str(metadata.get(AUTHORIZATION, "")).removeprefix("Bearer ").encode()
        # Compares with all of them, so that the time says nothing.
        return frozenset([worker for worker, token in self._known if hmac.compare_digest(given, token)])

    def binds(self, worker: str) -> bool:
        """Return whether a line of the file names a worker."""
        return any(worker == bound for bound, _ in self._known)


class Access:
    """The checks of a call before its messages are read."""

    def __init__(self, options: ServerSettings) -> None:
        """Raises TokenFileError."""
        self._tokens = Tokens(Path(options.token_file)) if options.token_file else None
        named = self._tokens is not None or bool(options.tls_ca)
        self.remote = options.insecure or (bool(options.tls_cert) and named)
        self._missing = "--tls-cert and --tls-key" if named else "--tls-cert, --tls-key and --token-file"

    def admit(self, metadata: Mapping[str, Any]) -> Refusal | None:
        """Return why a call with this metadata is refused; None if it is not."""
        if self._tokens is None or self._tokens.owners(metadata):
            return None
        given = "one that is not good here" if AUTHORIZATION in metadata else "none"
        return refusal(
            Reason.TOKEN, field="token", limit="one of the server's --token-file", value=given, remedy=REMEDY
        )

    def check(self, metadata: Mapping[str, Any], worker: str) -> None:
        """Raise Refused for a worker that the token of this call is not good for. worker: "" for a call that
        names none."""
        if self._tokens is None or not worker:
            return
        owners, bound = self._tokens.owners(metadata), self._tokens.binds(worker)
        if (worker if bound else "") in owners:
            return
        limit = "the token of this worker" if bound else "a token that is bound to no other worker"
        value = "one that is bound to none" if "" in owners else "that of another one"
        raise refused(Reason.TOKEN, worker=worker, field="token", limit=limit, value=value, remedy=REMEDY)

    def check_peer(self, peer: str) -> None:
        """Raise Refused for a gRPC peer of another machine, where only this one's are answered."""
        if self.remote or peer.startswith(_LOOPBACK):
            return
        raise refused(
            Reason.PROTECTED,
            field="peer",
            limit="a loopback address, because this server runs in protected mode",
            value=peer,
            remedy=f"start gc-server with {self._missing} (gc-certs makes certificates); or, if everyone who "
            "can reach its port may take part, with --insecure",
        )
