"""The upload of the initial parameters, which may take several calls: a later one continues a broken one.

The server keeps the chunks of at most one upload, until the job begins or another upload does. An upload is
the same if header and digest are.
"""

from __future__ import annotations

from dataclasses import replace

from ...proto import messages as m
from ...proto.entries import of_kind
from ...proto.manifest import Manifest
from ...proto.moments import Moments, MomentValues
from ...proto.refusal import Reason, refused
from ...proto.state import EntryValues
from ...proto.transfer import Assembly, Bytes, values_assembly


class Upload:
    """One upload. Its buffers are allocated at construction."""

    def __init__(self, header: m.InitializeHeader, manifest: Manifest) -> None:
        """
        Raises:
            Refused: the header's list of moments does not fit the manifest."""
        self._header = _content(header)
        self.values: Assembly = values_assembly(0, manifest, worker=header.worker)
        frozen = of_kind(manifest.entries, frozen=True)
        self._state = EntryValues(frozen, worker=header.worker)
        self._moments = MomentValues(header.moments, manifest, worker=header.worker)
        self.held = 0

    def is_of(self, header: m.InitializeHeader) -> bool:
        """Return True if a header announces the same bytes."""
        return bool(header.digest) and _content(header) == self._header

    @property
    def complete(self) -> bool:
        """True once all chunks have arrived."""
        return self._moments.complete and self._state.complete and self.values.complete

    @property
    def share(self) -> str:
        """The share that has arrived, as text."""
        parts = (self.values, self._state, self._moments)
        size = sum(part.size for part in parts)
        return f"{sum(part.arrived for part in parts) / max(size, 1):.0%} of {size / 1e6:.1f} MB"

    def check_start(self, header: m.InitializeHeader) -> None:
        """Raise Refused unless a call begins with the next chunk; the worker then asks for its number."""
        if header.held != self.held:
            limit, value = f"the upload from chunk {self.held} on", f"from chunk {header.held} on"
            raise refused(Reason.CHUNK, worker=header.worker, field="upload", limit=limit, value=value)

    def add(self, chunk: m.Chunk) -> None:
        """Take the next chunk. Raises Refused if it is damaged or of another place."""
        parts = (self.values, self._state, self._moments)
        next(part for part in parts if not part.complete).add(chunk)
        self.held += 1

    def finish(self) -> tuple[dict[str, Bytes], Moments]:
        """Return the values of the entries and the optimizer's state, once all chunks have arrived. Raises
        Refused if a value is one that the optimizer cannot have computed."""
        return self._state.finish(), self._moments.finish()


def _content(header: m.InitializeHeader) -> m.InitializeHeader:
    """Return the part of a header that names the bytes of the upload, without sender and first chunk."""
    return replace(header, worker="", incarnation=0, held=0, asks=False)
