"""The messages that a worker sends, and sends again on a new stream. No I/O.

| message | is written (`sending`) | after a break |
|---|---|---|
| short: heartbeat, `Ready`, report, … | at once, between two chunks | `Ready`, last report, `Stop`: again |
| part of a push | after `welcome`, by its turn, while there is credit | again, unless the server has it |
| commit | after all messages queued before it | again |
| coded packet, snapshot | after all messages queued before it | lost: the server requests it again |

Parts are kept until their push is settled, so that a new stream, or a request after damage, gets the same
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.updates import NOTHING_SHARED, SharedSizes
from ...proto.wire import encode_worker
from .sending import SendQueue, Transfer


@dataclass(slots=True)
class _UnsettledPush:
    """Messages of a push without an outcome, kept to be sent again.

    Attributes:
        unwanted: True if the server does not need the parts, unless it requests the push again.
    """

    plan: int = 0
    parts: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    commit: m.Commit | None = None
    unwanted: bool = False


class Outgoing:
    """The messages for the present stream, and those that are kept for the next one.

    Belongs to the event loop's thread.

    Attributes:
        version: version of the replica once all messages that have arrived are applied; None before the
            first version.
        shared: sizes of the job's state beside the values, by which updates are checked.
        drifted: version at which the replica differed from the server's, until it is reported; 0 for none.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.shared = NOTHING_SHARED
        self.version: int | None = None
        self.drifted = self.assigned = 0
        self._restored = False
        self._accumulate = 0
        self._repeated: dict[type, m.WorkerMessage] = {}
        self._pushes: dict[int, _UnsettledPush] = {}  # by seq, ascending
        self.queue = SendQueue(self._pushes)
        self._welcome = False  # whether the server has listed the parts that it has of open pushes
        self._sleeps = False  # whether `Ready` is withheld because the owner's thread is stalled

    def open_stream(self, hello: m.Hello, *, ready: bool = True) -> None:
        """Begin a new stream: queue `Hello`, `Ready` and repeated messages. Pushes wait for `welcome`.
        ready: True if the owner's thread can take work; if not, `Ready` waits for `wake`."""
        self.queue.open_stream()
        self._welcome = False
        for push in self._pushes.values():  # a restarted server may need parts that it declined before
            push.unwanted = False
        self.say(hello)
        self._sleeps = not ready
        if self.manifest is not None and ready:
            self._say_ready(self.manifest)
        for message in self._repeated.values():
            self.say(message)

    def welcome(self, welcome: m.Welcome) -> None:
        """Send open and committed pushes again, without the parts that the server has.

        1. A push that the server knows and this worker does not was abandoned: send `Abandon` again.
        2. A push under another plan than the server's: send only the commit.
        3. Any other push: send the parts that the server lacks, and the commit.
        """
        self._welcome = True
        known = {each.seq: frozenset(each.parts) for each in welcome.stored}
        for seq in known.keys() - self._pushes.keys():  # the first `Abandon` may have been lost
            self.queue.put(encode_worker(m.Abandon(seq=seq)))
        for seq, push in self._pushes.items():
            older = push.plan != welcome.plan
            self._queue_again(push, frozenset(push.parts) if older else known.get(seq, frozenset()))

    def end_stream(self) -> None:
        """End the stream. Until the next one, messages that are not kept for resending are lost."""
        self.queue.end_stream()

    # ---- short messages

    def say(self, message: m.WorkerMessage) -> bool:
        """Queue a short message (`SendQueue.say`)."""
        return self.queue.say(message)

    def ready(
        self,
        manifest: Manifest,
        restored: bool = False,
        accumulate: int = 0,
        shared: SharedSizes = NOTHING_SHARED,
    ) -> None:
        """Tell the server, now and on each new stream, that this worker can take work. restored: True if the
        worker continues from its own saved state. shared: sizes of the job's state beside the values."""
        self.shared = shared
        self.manifest, self._restored, self._sleeps = manifest, restored, False
        self._accumulate = accumulate
        self._say_ready(manifest)

    def wake(self) -> None:
        """Send the `Ready` that was withheld because the owner's thread was stalled, if one was."""
        if self._sleeps and self.queue.open:
            self._sleeps = False
            if self.manifest is not None:
                self._say_ready(self.manifest)

    def repeat(self, message: m.Evaluation | m.Stop | m.More) -> None:
        """Send a message now and on each new stream, until another one of its type follows."""
        if isinstance(message, m.Evaluation):
            self.wake()
        self._repeated[type(message)] = message
        self.say(message)

    # ---- pushes

    def queue_part(self, seq: int, number: int, transfer: Transfer) -> None:
        """Queue a part of a push, and keep it for resending until the push is settled."""
        self.wake()
        push = self._pushes.setdefault(seq, _UnsettledPush())
        push.parts[number] = transfer
        if isinstance(transfer.header, m.PartHeader):
            push.plan = transfer.header.plan
        if self._welcome and not push.unwanted:
            self.queue.put(transfer)

    def queue_commit(self, commit: m.Commit) -> None:
        """Queue the commit of a push, and keep it for resending until the push is settled."""
        self.wake()
        self._pushes.setdefault(commit.seq, _UnsettledPush()).commit = commit
        if self._welcome:
            self.queue.put(encode_worker(commit))

    def abandon(self, seq: int) -> None:
        """Discard a push that will not be committed, and tell the server."""
        self.wake()
        self.settle(seq)
        if self._welcome:
            self.queue.put(encode_worker(m.Abandon(seq=seq)))

    def unwanted(self, seq: int) -> None:
        """Stop sending the parts of a push, which the server does not need; keep them for a later request."""
        push = self._pushes.get(seq)
        if push is not None:
            push.unwanted = True
            self.queue.drop({(seq, part) for part in push.parts})

    def settle(self, seq: int) -> None:
        """Discard the messages of a push that has its outcome, and return the credit of its parts."""
        self._pushes.pop(seq, None)
        self.queue.settle(seq)

    def stored(self, seq: int, parts: Iterable[int]) -> None:
        """Return the credit of parts that the server has stored or does not need."""
        self.queue.answered({(seq, part) for part in parts})

    def resend(self, seq: int, part: int | None) -> None:
        """Send a push without an outcome, or one part of it, again; the queued copy is dropped. part: number
        of the part; None for all parts and the commit."""
        push = self._pushes.get(seq)
        if push is None or not self._welcome:
            return
        self.queue.rate_again(seq)
        if part is None:
            push.unwanted = False
            self.queue.drop({(seq, number) for number in push.parts})
            self._queue_again(push, frozenset())
        elif part in push.parts and not push.unwanted:
            self.queue.drop({(seq, part)})
            self.queue.put(push.parts[part])

    # ---- inside

    def _queue_again(self, push: _UnsettledPush, known: frozenset[int]) -> None:
        """Queue the parts of a push that are not in `known`, and its commit."""
        for number, transfer in push.parts.items():
            if number not in known:
                self.queue.put(transfer)
        if push.commit is not None:
            self.queue.put(encode_worker(push.commit))

    def _say_ready(self, manifest: Manifest) -> None:
        plan = self.queue.plan
        ready = m.Ready(
            fingerprint=manifest.fingerprint,
            version=self.version,
            assigned=self.assigned,
            plan=0 if plan is None else plan.number,
            data=manifest.data,
            train_samples=manifest.train_samples,
            drifted=self.drifted,
            restored=self._restored and self.version is None,
            model=manifest.to_message() if self.version is None and manifest.is_short else None,
            accumulate=self._accumulate,
        )
        self.drifted = 0
        self.say(ready)
