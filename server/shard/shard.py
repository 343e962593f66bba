"""The protocol between control and the owner of the parameters. Control never sees a tensor; a shard knows no
rule of a job. `local` implements the protocol in the server's process.

The conductor and its components give orders, and the shard answers with reports. No other code reads a
shard's state: `reported` holds its last reports, on the event loop. The protocol has these 14 messages and no
others:

    | no. | order         | identified by      | a repeated order                                      |
    |-----|---------------|--------------------|-------------------------------------------------------|
    | 1   | open          | once in a life     | is refused by control (`accept`)                      |
    | 2   | put           | push and part      | changes nothing: the first copy counts                |
    | 3   | drop          | push               | drops nothing                                         |
    | 4   | open_round    | version            | is ignored, also once the version is applied          |
    | 5   | change_round  | assignments        | finds them gone                                       |
    | 6   | apply         | version            | is ignored and answered with the last report          |
    | 7   | replace       | version            | is ignored if it is older, else has the same effect   |
    | 8   | adopt         | number of the plan | is ignored                                            |
    | 9   | image         | none: a read       | is answered again                                     |
    | 10  | snapshot      | none: a read       | is answered again                                     |
    | 11  | values        | none: a read       | is answered again                                     |
    | 12  | copy          | none: a read       | is answered again                                     |
    |     | **report**    |                    |                                                       |
    | 13  | Final         | version and part   | a part of the open round is about to be stepped       |
    | 14  | Encoded       | version and part   | a part of an update, through `send`                   |

`apply` is answered with `Applied`, and a read with the values that it requests. A caller may repeat an order
with all orders that followed it, up to the last `apply`. The shard then ends with the same bits and sends
nothing twice. Within the open round, a caller may repeat the latest order about a push or an assignment.

Must not happen:

- An order takes effect before an earlier order. Hence a read between two `apply` returns the version between
  them. `put`, `drop` and `adopt` take effect at once. `replace` with values takes effect once the values are
  decoded. A read in the meantime returns the previous version.
- The order of arrival changes the bits: `apply` sums pushes in the order that it is given.
- A version is reported as applied although some of its parts are missing. If `apply` raises, the version
  stays the previous one and the job cannot continue. The parameters are then those of the previous version,
  if a copy is kept, or else those of the replica that every worker has.
- `adopt` is ordered while a push waits to be applied. Orders before `adopt` use the old plan, later orders
  use the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...common.parts import Plan
from ...compressors import Payload
from ...proto.manifest import Manifest
from ...proto.messages import Moment
from ...proto.transfer import Assembly
from ..job.events import Apply, Exclude, MemberLost, Open, PushKey, Substitute
from .mean import Push
from .reports import Applied, Final, Reported
from .store import Copy, EarlierBases, Encoded, Recall, Send

T = TypeVar("T")
Image = Mapping[str, Any]  # complete state of a shard between two versions; made by `Store.image`


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedValues:
    """All parameters of one version, or the optimizer's state at that version, encoded for sending.

    Attributes:
        chunks: encoded messages, each with at most one chunk of the data; they may be read several times.
        moments: list of the optimizer's tensors, for the header of the reply; empty for parameters.
    """

    version: int
    chunks: Iterable[bytes]
    moments: Sequence[Moment] = ()


class Shard(Protocol):
    """Interface of the owner of the parameters: it holds parameters and optimizer state, sums pushes and
    encodes updates. The conductor uses it; the head of this file numbers the orders."""

    @property
    def reported(self) -> Reported:
        """The shard's last reports. Its `manifest` is None until `open` has returned; no other order may
        precede that."""
        ...

    def start(self) -> None:
        """Start to load the kernels that applying needs, while the workers join. Does not wait for them."""
        ...

    def close(self) -> None:
        """Free all resources. No order may be in progress."""
        ...

    async def open(
        self,
        manifest: Manifest,
        begin: Assembly | Image,
        plan: Plan,
        accept: Callable[[], T],
        keep: Callable[[Image, Plan], Awaitable[None]] | None = None,
        recall: Recall | None = None,
        bases: EarlierBases | None = None,
    ) -> T:
        """Create the parameters at version 0, or restore them from an image that was taken under the same
        plan.

        Args:
            begin: initial values of version 0, or the image to restore.
            accept: informs control that the shard is open, on the event loop; if it raises, the new
                parameters are discarded.
            keep: stores the image of version 0 and its plan; awaited before `accept`. None to store nothing.
            recall: supplies the optimizer's state for version 0; None for an empty state.
            bases: bases for version 0 from an earlier job; None for those of the job's seed.

        Returns:
            The result of `accept`.

        Raises:
            Refused: the initial values are not finite.
        """
        ...

    def put(
        self,
        key: PushKey,
        part: int,
        payloads: Sequence[Payload],
        assignment: int = 0,
        learning_rates: Sequence[float] = (),
    ) -> None:
        """Take a stored part of a push. If a round is open and every member has stored this part now, step
        it.

        Args:
            payloads: valid payloads of the part, end to end; empty if the push contributes nothing to the
                part.
            assignment: id of the assignment that the push answers; 0 for a push outside of the open round.
            learning_rates: learning rates of the step, by parameter group; empty for those of the job. All
                pushes of a round have the same rates.
        """
        ...

    def drop(self, key: PushKey) -> None:
        """Discard the parts of a push that have not been stepped."""
        ...

    def open_round(self, order: Open, send: Send, report: Callable[[Final], None]) -> None:
        """Open a round whose parts are stepped one by one: each part as soon as every member of the round has
        stored it or is excluded.

        Args:
            order: version that the round produces, and its members.
            send: receives each encoded part of the update, as in `apply`, which closes the round.
            report: called before each part is stepped.
        """
        ...

    def change_round(self, order: MemberLost | Substitute | Exclude) -> None:
        """Change the members for which the parts of the open round wait. Does nothing if no round is open.

        The effect depends on the order:

        - `MemberLost`: no part is stepped before each lost slot has a substitute or is excluded.
        - `Substitute`: a worker, which may be the lost one, takes over the lost member's slot. Parts that the
          lost member has stored are discarded. Only parts that are not final are taken from the substitute.
        - `Exclude`: parts no longer wait for these assignments, and their pushes are not summed."""
        ...

    def apply(
        self, order: Apply, pushes: Sequence[Push], send: Send, learning_rates: Sequence[float] = ()
    ) -> Awaitable[Applied]:
        """Produce a version from the previous one with the pushes that the order names, and close the open
        round.

        Args:
            order: version to produce, its contributions in the order of the sum, and the weight of the step.
            pushes: the parts of each contribution, in the order of the contributions.
            send: called on the event loop with each part of the update as soon as it is encoded; the part is
                the same for every worker.
            learning_rates: learning rates of the step, by parameter group; empty for those of the job.

        Returns:
            An awaitable of the report on the applied version.

        Raises:
            DivergedError: a parameter is not finite any more.
        """
        ...

    def replace(self, version: int, values: Assembly | None = None) -> Awaitable[None]:
        """Replace the parameters by a worker's snapshot, or only give them another version number.

        Args:
            version: number of the version from now on.
            values: the snapshot; None to leave the parameters unchanged.

        Raises:
            DivergedError: the snapshot is not finite.
        """
        ...

    def adopt(self, plan: Plan) -> Awaitable[None]:
        """Divide the model by another plan. A plan whose number is not above the current one's is ignored."""
        ...

    def image(self) -> Awaitable[Image]:
        """Return the complete state between two versions, in the form that `open` restores."""
        ...

    def snapshot(self) -> Awaitable[list[Encoded]]:
        """Return the replica as an update, one entry for each part, for a worker that has no replica or an
        outdated one."""
        ...

    def values(self, *, moments: bool = False) -> Awaitable[EncodedValues]:
        """Return the parameters, or the optimizer's state, encoded. If parts of the open round have been
        stepped, wait until that round is applied. Callers that ask for the same version share the chunks.
        moments: return the optimizer's state, by parameter, instead of the parameters."""
        ...

    def copy(self, *, last: bool = False, undo: bool = False) -> Awaitable[Copy]:
        """Return the parameters as every worker has them, and their SHA-256.

        Args:
            last: True to share the shard's memory; no `apply` may follow. False for a copy.
            undo: first restore the last version, if parts of the next one have been stepped and the previous
                values are kept. No `apply` may follow."""
        ...
