"""The border between control and the owner of the parameters. Control never sees a tensor; a shard knows no
rule of a job. `local` has the shard that lives in the server's process.

Arrows go one way: the conductor and what it is made of give orders, and the shard answers. Nobody reads a
shard's state: `reported` is what its last reports said, on the event loop. 15 messages pass, and no others.

    order             its number               a repeated order
    1  open           once in a life           is refused by control (`accept`)
    2  put            push and part            changes nothing: the first copy counts
    3  drop           push                     drops nothing
    4  open_round     version                  is ignored, also once the version is applied
    5  change_round   assignments              finds them gone
    6  apply          version                  is ignored and answered with the last report
    7  replace        version                  is ignored if it is older, else it says the same
    8  adopt          number of the plan       is ignored
    9  measure_norms  version                  is ignored
    10 image          none: these four read    answers again
    11 snapshot
    12 values
    13 copy
    report
    14 Final          version and part         a part of the open round is about to be stepped
    15 Encoded        version and part         a part of an update, through `send`

`apply` is answered with `Applied`, and a read with what it asks for. Orders may be repeated with all that
followed them, up to the last `apply`: the shard ends with the same bits, and sends nothing twice. Within the
open round the latest order about a push or an assignment may be repeated.

What may not happen:

- An order takes effect before one that was given earlier. So a read between two `apply` is of the version
  between them. `put`, `drop` and `adopt` take effect at once. `replace` with values takes effect once these
  are decoded; reads that come meanwhile are of the version before.
- The order of arrival changes the bits: `apply` sums in the order that it is given.
- A version is reported as applied with some parts of it missing. If `apply` raises, the version is that of
  before, the parameters are its own or, with a lossy downlink, those that the workers have, and the job
  cannot go on.
- `adopt` comes while a push is to be applied. Orders before it go by the old plan, later ones by the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...compressors import Payload, Plan
from ...proto.manifest import Manifest
from ...proto.messages import Moment
from ...proto.transfer import Assembly
from ..job.events import Apply, Exclude, MemberLost, Open, PushKey, Substitute
from .mean import Push
from .reports import Applied, Final, Reported
from .store import Copy, Encoded, Recall, Send

T = TypeVar("T")
Image = Mapping[str, Any]  # all that a shard remembers between two versions; `Store.image` makes it


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedValues:
    """All parameters of one version as chunks; or the optimizer's state, with the list for its header."""

    version: int
    chunks: Sequence[bytes]
    moments: Sequence[Moment] = ()


class Shard(Protocol):
    """Holds parameters and optimizer state, sums pushes, encodes updates. The module numbers the orders."""

    @property
    def reported(self) -> Reported:
        """The last reports. `manifest` is None until `open` has returned; nothing else is ordered before."""
        ...

    def start(self) -> None:
        """Load what applying takes, while the workers come."""
        ...

    def close(self) -> None:
        """Let go of everything. Nothing may be in progress any more."""
        ...

    async def open(
        self,
        manifest: Manifest,
        begin: Assembly | Image,
        plan: Plan,
        accept: Callable[[], T],
        keep: Callable[[Image, Plan], Awaitable[None]] | None = None,
        recall: Recall | None = None,
    ) -> T:
        """Begin with version 0, or go on from an image that was taken under this plan.

        Args:
            begin: values of version 0, or the image.
            accept: tells control, on the event loop; if it raises, what was built is forgotten.
            keep: is given the image of version 0 and its plan, and awaited before `accept`.
            recall: what the optimizer begins with at version 0.

        Returns:
            The result of `accept`.

        Raises:
            Refused: values are not finite.
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
        """Take a stored part of a push: step it, if a round is open in which every member has it now.

        Args:
            payloads: valid, end to end; none where the push contributes nothing to the part.
            assignment: id of the one that the push answers.
            learning_rates: of the step, by parameter group; none for those of the job. All pushes of a round
                have the same.
        """
        ...

    def drop(self, key: PushKey) -> None:
        """Forget the parts of a push that have not been stepped."""
        ...

    def open_round(self, order: Open, send: Send, report: Callable[[Final], None]) -> None:
        """From now on step each part as soon as every member of the round has stored it or is given up.

        Args:
            send: as for `apply`, which closes the round.
            report: called before each part is stepped.
        """
        ...

    def change_round(self, order: MemberLost | Substitute | Exclude) -> None:
        """Change whom the parts of the open round wait for; without one there is nothing to do.

        After `MemberLost` no part is stepped before each of these slots has a substitute or is given up.
        `Substitute` gives a lost member's slot to a member, which may be the lost one; of a substitute only
        parts count that are not final, and parts that the lost member has stored are discarded. After
        `Exclude` parts do not wait for these; those that are given up together are not stepped with one
        another either.
        """
        ...

    def apply(
        self, order: Apply, pushes: Sequence[Push], send: Send, learning_rates: Sequence[float] = ()
    ) -> Awaitable[Applied]:
        """Turn version - 1 into version with the pushes that the order names, and close the open round.

        Args:
            pushes: the parts of each contribution, in their order.
            send: called on the event loop with each part of the update, the same for every worker, as soon
                as it is encoded.
            learning_rates: as in `put`.

        Raises:
            DivergedError: the parameters are not finite any more.
        """
        ...

    def replace(self, version: int, values: Assembly | None = None) -> Awaitable[None]:
        """Have the parameters be a worker's snapshot, or call those that there are another version.

        Raises:
            DivergedError: the snapshot is not finite.
        """
        ...

    def adopt(self, plan: Plan) -> Awaitable[None]:
        """Divide the model by another plan."""
        ...

    def measure_norms(self, version: int) -> None:
        """Find `Applied.square_norms` anew, with the first version after this one of which nothing has been
        stepped."""
        ...

    def image(self) -> Awaitable[Image]:
        """Return all that is remembered, as `open` takes it."""
        ...

    def snapshot(self) -> Awaitable[list[Encoded]]:
        """Return the parameters that every worker has, as an update for one that has none or old ones."""
        ...

    def values(self, *, moments: bool = False) -> Awaitable[EncodedValues]:
        """Return the parameters, or the optimizer's state, encoded. Several that ask for one version share
        the chunks. Waits for a round of which parts have been stepped already."""
        ...

    def copy(self, *, undo: bool = False) -> Awaitable[Copy]:
        """Return the parameters as every worker has them.

        Args:
            undo: go back to the last version first, if parts of the next one have been stepped and the values
                before are kept. No `apply` may follow.
        """
        ...
