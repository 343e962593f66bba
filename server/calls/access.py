"""Access to this server: tokens, and the peers whose calls it answers."""

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
    "start the worker with --token-file FILE, a file that contains a token of this job; if a line of the "
    "server's file names this worker, use the token of that line"
)
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "unix:")


class TokenFileError(ValueError):
    """Raised when the file of --token-file cannot be read or is invalid. The message never contains a
    token."""


class Tokens:
    """The tokens of a file, which is read again when it has changed. `Access` owns it, on one event loop.

    A line `WORKER-ID:TOKEN` *binds* the id: the token is valid for that worker alone. No other token is valid
    for a bound worker, unless another line binds it too. A line `TOKEN` is valid for every worker that is not
    bound. Lines that begin with # are comments."""

    def __init__(self, path: Path) -> None:
        """Read the tokens of a file. Raises TokenFileError if the file cannot be read or is invalid."""
        self._path = path
        self._changed_at = 0
        self._said = ""  # the error that the log has, if there still is one
        self._known: list[tuple[str, bytes]] = []
        self._read()

    def _read(self) -> None:
        """Read the file again if it has changed. Raises TokenFileError, and keeps the previous tokens
        then."""
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
            # Never quote `worker` here: it may be part of a token.
            if not why and colon and why_no_name(worker):
                why = f"WORKER-ID before the colon: expected {NAME_RULE}"
            if why:
                raise TokenFileError(f"--token-file {self._path}, line {number}: {why}")
            known.append((worker, token.encode()))
        if not known:
            raise TokenFileError(
                f"--token-file {self._path}: expected at least one line with a token, got none"
            )
        self._known, self._changed_at = known, changed_at

    def owners(self, metadata: Mapping[str, Any]) -> frozenset[str]:
        """Return the ids to which a call's token is bound, and "" if a line has the token without an id.
        Empty for a call without a token or with an unknown one."""
        try:
            self._read()
            self._said = ""
        except TokenFileError as error:  # the file may be half written or missing
            if str(error) != self._said:  # not once for every call
                self._said = str(error)
                log.error("%s; the tokens that were read before stay valid", error)
        token = str(metadata.get(AUTHORIZATION, "")).removeprefix("Bearer ").encode()
        # Compares with every token in constant time, so that the duration reveals none.
        return frozenset([worker for worker, known in self._known if hmac.compare_digest(token, known)])

    def binds(self, worker: str) -> bool:
        """Return True when a line of the file binds the worker."""
        return any(worker == bound for bound, _ in self._known)


class Access:
    """The checks of a call before its messages are read. The daemon creates it from the options; `Service`
    asks it."""

    def __init__(self, options: ServerSettings) -> None:
        """Read the token file, if there is one, and decide whether other machines are answered. Raises
        TokenFileError if the file of --token-file cannot be read or is invalid."""
        self._tokens = Tokens(Path(options.token_file)) if options.token_file else None
        named = self._tokens is not None or bool(options.tls_ca)
        self.remote = options.insecure or (bool(options.tls_cert) and named)
        self._missing = "--tls-cert and --tls-key" if named else "--tls-cert, --tls-key and --token-file"

    def admit(self, metadata: Mapping[str, Any]) -> Refusal | None:
        """Return the refusal of a call whose metadata lack a valid token; None if the call is admitted or no
        tokens are required."""
        if self._tokens is None or self._tokens.owners(metadata):
            return None
        got = "an unknown one" if AUTHORIZATION in metadata else "none"
        return refusal(
            Reason.TOKEN, field="token", limit="one of the server's --token-file", value=got, remedy=REMEDY
        )

    def check(self, metadata: Mapping[str, Any], worker: str) -> None:
        """Check that a call's token is valid for the worker that the call names. Raises Refused (TOKEN) if
        the token is missing or not valid for this worker. worker: id of the worker; "" for a call that names
        no worker."""
        if self._tokens is None or not worker:
            return
        owners, bound = self._tokens.owners(metadata), self._tokens.binds(worker)
        if (worker if bound else "") in owners:
            return
        limit = (
            "the token that is bound to this worker" if bound else "a token that is bound to no other worker"
        )
        value = "a token that is bound to no worker" if "" in owners else "a token of another worker"
        raise refused(Reason.TOKEN, worker=worker, field="token", limit=limit, value=value, remedy=REMEDY)

    def check_peer(self, peer: str) -> None:
        """Check that a peer may call this server: in protected mode only processes on this machine may.
        Raises Refused (PROTECTED) if the peer is on another machine. peer: address of the peer as gRPC writes
        it."""
        if self.remote or peer.startswith(_LOOPBACK):
            return
        raise refused(
            Reason.PROTECTED,
            field="peer",
            limit="a loopback address, because this server runs in protected mode",
            value=peer,
            remedy=f"start gc-server with {self._missing} (gc-certs makes certificates); use --insecure "
            "instead only on networks you trust",
        )
