"""The server's copy of the parameters that are at the workers, and whether the workers' replicas agree.

The copy:

    installed   has `version`; `since` lists the samples trained on after it  -> asked
    asked       a member was asked for the current version                    -> loading; installed, if the
                                                                                 member or its answer is lost
    loading     a snapshot has arrived and is being installed                 -> installed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .....common.stored import stored
from ... import events as e
from ...roster import Member, Name
from ...samples import Drawn, Samples

DRIFT_VERSIONS = 100  # after which replicas that differ are brought together, if no epoch ends before


@stored("server-copy")
@dataclass(slots=True)
class ServerCopy:
    version: int = 0
    asked: Name | None = None  # the member that was asked for the current version
    loading: int | None = None  # the version that is being installed
    due: bool = False  # a new copy is wanted though no member needs it
    since: list[tuple[int, Drawn]] = field(default_factory=list[tuple[int, Drawn]])  # with resulting version

    def request(self, able: Iterable[Member], version: int, apply: int) -> list[e.Action]:
        """Ask the first of these members for this version, unless it is here or was asked for."""
        if self.version == version:
            self.due = False
        if self.version == version or self.asked is not None or self.loading is not None:
            return []
        for member in able:
            self.asked = member.id
            return [e.RequestSnapshot(worker=member.worker, version=version, apply=apply)]
        return []

    def forget(self, member: Member) -> None:
        """Called when a request to this member, or its answer, may be lost."""
        if self.asked == member.id:
            self.asked = None

    def arrived(self, version: int) -> None:
        """Called when a snapshot has arrived; it is installed even if its sender is lost."""
        self.asked, self.loading, self.due = None, version, False

    def taken(self, version: int) -> None:
        assert version == self.loading
        self.since = [each for each in self.since if each[0] > version]
        self.version, self.loading = version, None

    def become(self, version: int, samples: Samples) -> None:
        """Declare the copy to be this version; the samples trained on since are drawn again."""
        for _, drawn in self.since:
            samples.give_back(drawn, settled=True)
        self.since, self.asked, self.version = [], None, version


@stored("drift")
@dataclass(slots=True)
class Drift:
    """Members whose replicas differ from the first one's. Sums are equal to the bit, or an exchange is
    replaced, but computers of different makes may take the same step differently in the last bits."""

    names: set[Name] = field(default_factory=set[Name])
    since: int = 0  # version

    def compare(self, version: int, members: Sequence[Member], checksums: Sequence[int]) -> list[e.Action]:
        """Compare the members' replicas at a version, in the order of their ranks."""
        pairs = zip(members, checksums, strict=True)
        differing = [member for member, checksum in pairs if checksum != checksums[0]]
        ids = {member.id for member in differing}
        new = ids - self.names
        if not self.names:
            self.since = version
        self.names = ids
        if not new:
            return []
        names = ", ".join(member.name for member in differing)
        text = (
            f"version {version}: the replicas of {names} differ from that of {members[0].name}, as on "
            "computers of different makes; they get its parameters when the epoch ends"
        )
        return [e.Note(text=text, warning=True)]

    def is_due(self, version: int) -> bool:
        """Return whether replicas have differed for too long."""
        return bool(self.names) and version - self.since >= DRIFT_VERSIONS
