"""Packets and snapshots, which workers send in coded mode: the server relays packets and keeps snapshots."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...proto.manifest import Manifest
from ...proto.messages import Chunk, Packet, Snapshot
from ...proto.refusal import Refusal, Refused, sentence
from ...proto.transfer import Assembly, ChunkValidator, packet_transfer, values_assembly
from ...proto.wire import encode_chunk
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..job.modes.mode import Exchanges
from ..streams.outbox import Outbox, WorkerStream

log = logging.getLogger("gradwire.server")


class Relay:
    """One packet that is being relayed. Each chunk is checked and forwarded at once, which lets upload and
    download overlap. `Uploads` creates it."""

    def __init__(self, packet: Packet, targets: Sequence[Outbox], worker: str) -> None:
        """Forward the packet's header to the targets. targets: outboxes of the workers that get the
        packet."""
        self.packet = packet
        self.targets = targets
        self._validator = ChunkValidator(packet_transfer(packet), 4 * packet.elements, worker=worker)
        for target in targets:
            target.send(packet)

    @property
    def complete(self) -> bool:
        """Whether all chunks have been forwarded."""
        return self._validator.complete

    def add(self, chunk: Chunk) -> None:
        """Check a chunk and forward it to the targets. Raises Refused (CHUNK or CHECKSUM); the chunks that
        were forwarded before are useless then."""
        self._validator.add(chunk)
        where = chunk.transfer, chunk.offset
        message = encode_chunk(*where, (chunk.data,), chunk.crc32c, packed=chunk.packed)
        for target in self.targets:
            target.put(message)


class Uploads:
    """The packets and snapshots that one stream uploads, one at a time. `WorkerCall` creates it for its
    stream, in jobs whose workers exchange packets."""

    def __init__(self, conductor: Conductor, stream: WorkerStream, rules: Exchanges) -> None:
        self._conductor = conductor
        self._stream = stream
        self._rules = rules
        self._arriving: Relay | tuple[Snapshot, Assembly] | None = None
        self._dropping: int | None = None  # transfer whose chunks are ignored

    def end(self) -> None:
        """End the current upload. Called when a message arrives that is not a chunk. An incomplete packet is
        reported as damaged. Raises Refused if a snapshot is incomplete, so the stream cannot continue."""
        unfinished, self._arriving, self._dropping = self._arriving, None, None
        why = refusals.packet(self._stream.worker, "all chunks of it before another message", "only some")
        if isinstance(unfinished, Relay):
            self._damaged(unfinished, why)
        elif unfinished is not None:
            raise Refused(why)

    def begin(self, header: Packet | Snapshot) -> None:
        """Begin to receive a packet or a snapshot. Raises Refused if the job has no parameters yet, or does
        not expect this upload; the stream cannot continue."""
        self.end()
        manifest = self._conductor.shard.reported.manifest
        if manifest is None:
            raise Refused(refusals.not_initialized(self._stream.worker, type(header).__name__))
        if isinstance(header, Snapshot):
            self._begin_snapshot(header, manifest)
        else:
            self._begin_packet(header, manifest)

    def _begin_packet(self, packet: Packet, manifest: Manifest) -> None:
        """Relay a packet to the workers that control names, or ignore it if its exchange is over. Raises
        Refused for a wrong size."""
        expected = self._rules.packet_elements(packet.exchange, manifest.gradient_elements)
        if expected not in (None, packet.elements):
            limit, value = f"{expected} elements", f"{packet.elements}"
            raise Refused(refusals.packet(self._stream.worker, limit, value))
        self._dropping = packet_transfer(packet)
        begun = e.PacketStarted(
            *self._stream.id, exchange=packet.exchange, index=packet.index, checksums=packet.checksums
        )
        targets = self._conductor.happen(begun)
        if targets is None:  # its exchange is over: ignore the chunks
            return
        streams = self._conductor.streams
        outboxes = [streams[worker].outbox for worker in targets if worker in streams]
        self._dropping = None
        self._continue(Relay(packet, outboxes, self._stream.worker))

    def _begin_snapshot(self, snapshot: Snapshot, manifest: Manifest) -> None:
        """Receive a snapshot, or ignore it if a leaving worker sends it and it is no longer needed. Raises
        Refused for one that was not requested."""
        worker = self._stream.worker
        if snapshot.leaving and not self._rules.wants_copy(worker, snapshot.version, leaving=True):
            self._dropping = snapshot.version  # another worker has sent this version or a newer one
            return
        if not snapshot.leaving and not self._rules.wants_copy(worker, snapshot.version):
            limit = "a snapshot that the server has requested from this worker"
            raise Refused(refusals.packet(worker, limit, f"a snapshot of version {snapshot.version}"))
        self._arriving = snapshot, values_assembly(snapshot.version, manifest, worker=worker)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk to the current upload. Raises Refused if the chunk belongs to no upload, or is an
        invalid one of a snapshot, so the stream cannot continue."""
        if self._arriving is None:
            if self._dropping != chunk.transfer:
                self._stream.arriving.add(chunk)  # refuses it: no header has announced it
        elif isinstance(self._arriving, Relay):
            self._relay(self._arriving, chunk)
        else:
            self._keep(*self._arriving, chunk)

    def _relay(self, relay: Relay, chunk: Chunk) -> None:
        """Forward a chunk of a packet, unless the exchange has been replaced or the chunk is damaged."""
        # None: the exchange has been replaced in the meantime.
        if self._rules.packet_elements(relay.packet.exchange, 1) is None:
            self._arriving, self._dropping = None, packet_transfer(relay.packet)
            return
        try:
            relay.add(chunk)
        except Refused as refused:
            self._arriving, self._dropping = None, packet_transfer(relay.packet)
            self._damaged(relay, refused.refusal)
            return
        self._continue(relay)

    def _damaged(self, relay: Relay, why: Refusal) -> None:
        """Report a damaged packet to control and operators."""
        log.warning("refused packet %d: %s", relay.packet.index, sentence(why))
        self._conductor.metrics.refusal(why.reason)
        self._conductor.happen(e.PacketDamaged(*self._stream.id, exchange=relay.packet.exchange, refusal=why))

    def _continue(self, relay: Relay) -> None:
        """Wait for the next chunk of a packet, or report it as relayed if it is complete. A packet of an
        empty slice has no chunk."""
        if not relay.complete:
            self._arriving = relay
            return
        self._arriving = None
        packet = relay.packet
        self._conductor.metrics.relayed(4 * packet.elements, len(relay.targets))
        self._conductor.happen(
            e.PacketRelayed(*self._stream.id, exchange=packet.exchange, index=packet.index)
        )

    def _keep(self, snapshot: Snapshot, assembly: Assembly, chunk: Chunk) -> None:
        """Add a chunk to a snapshot, and hand the snapshot to the conductor once it is complete."""
        assembly.add(chunk)
        if not assembly.complete:
            return
        self._arriving = None
        arrived = e.SnapshotReceived(*self._stream.id, version=snapshot.version, leaving=snapshot.leaving)
        self._conductor.copies[arrived.key] = assembly
        self._conductor.happen(arrived)
