"""The server's copy of the parameters that the workers have, and the comparison of the workers' replicas.

The workers have the parameters and step them. The server requests a copy from the member with the lowest
rank at the end of each epoch and at the end of the job. It also requests one when a member needs the current
version; the next round then waits until the copy has arrived.

If all members with the current version are lost, training waits for one of them to return with it. Once other
members are ready to train, it waits for at most `HOPE_LEASES` leases. Then it continues from the copy, and
the samples trained on since are drawn again.

The copy:

    installed | has `version`; `since` lists the samples | -> asked
              | trained on after it                      |
    asked     | a member was asked for the current       | -> loading; installed, if the member or its
              | version                                  |    answer is lost
    loading   | a snapshot has arrived and is being      | -> installed
              | installed                                |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..common.stored import stored
from ..server.job import events as e
from ..server.job.roster import Member, Name
from ..server.job.samples import Drawn, Samples

HOPE_LEASES = 3  # leases for which members wait for departed ones that have the only current version
DRIFT_VERSIONS = 100  # versions after which replicas that differ are replaced, if no epoch ends before


@stored("server-copy")
@dataclass(slots=True)
class ServerCopy:
    """The server's copy of the parameters, in coded mode."""

    version: int = 0  # version of the installed copy
    asked: Name | None = None  # member that was asked for the current version
    loading: int | None = None  # version that is being installed; None if none is
    due: bool = False  # True if a new copy is due although no member needs it, as at the end of an epoch
    hoping_since: float | None = None  # time from which members have waited for departed ones
    since: list[tuple[int, Drawn]] = field(default_factory=list[tuple[int, Drawn]])  # samples after it

    def request(self, able: Iterable[Member], version: int, apply: int) -> list[e.Action]:
        """Ask the first of the `able` members for a snapshot, unless the version is here or was asked for."""
        if self.version == version:
            self.due = False
        if self.version == version or self.asked is not None or self.loading is not None:
            return []
        for member in able:
            self.asked = member.id
            return [e.RequestSnapshot(worker=member.worker, version=version, apply=apply)]
        return []

    def wants(self, worker: str, version: int, current: int, *, leaving: bool) -> bool:
        """Return True if this worker's snapshot of a version should be installed.

        Args:
            leaving: True if the worker sends it without a request, because it leaves.
        """
        if leaving:
            idle = self.asked is None and self.loading is None
            return idle and self.version < version <= current
        return self.asked is not None and self.asked[0] == worker and version == current

    def hopes(self, now: float, ready: int, lease_s: float) -> bool:
        """Return True while training waits for departed members, which have the only current version.

        Args:
            ready: number of other members that are ready to train.
        """
        if not ready:
            self.hoping_since = None
        elif self.hoping_since is None:
            self.hoping_since = now
        return not self.gives_up(now, lease_s)

    def gives_up(self, now: float, lease_s: float) -> bool:
        """Return True once members have waited for `HOPE_LEASES` leases."""
        return self.hoping_since is not None and now - self.hoping_since > HOPE_LEASES * lease_s

    def forget(self, member: Member) -> None:
        """Forget the request to a member, because the request or its answer may be lost."""
        if self.asked == member.id:
            self.asked = None

    def arrived(self, version: int) -> None:
        """Record that a snapshot of `version` has arrived and is being installed, even if its sender is
        lost."""
        self.asked, self.loading, self.due = None, version, False

    def installed(self, version: int) -> None:
        """Record that the shard has installed the snapshot of `version`."""
        assert version == self.loading
        self.since = [each for each in self.since if each[0] > version]
        self.version, self.loading = version, None

    def relabel(self, version: int, samples: Samples) -> None:
        """Give the copy, unchanged, the number `version`. The samples trained on since it was made are
        drawn again."""
        for _, drawn in self.since:
            samples.give_back(drawn, settled=True)
        self.since, self.asked, self.version = [], None, version


@stored("drift")
@dataclass(slots=True)
class Drift:
    """Members whose replicas differ from that of the first member, in coded mode.

    Sums are equal to the bit, or an exchange is replaced. But computers of different makes may take the same
    step differently in the last bits.
    """

    names: set[Name] = field(default_factory=set[Name])  # members that differ
    since: int = 0  # version at which replicas began to differ
    found: int = 0  # number of members that differed in the last comparison

    def compare(self, version: int, members: Sequence[Member], checksums: Sequence[int]) -> list[e.Action]:
        """Compare the members' replicas by their checksums, and record the members that differ from the
        first.

        Returns:
            A warning for the log if further members differ.
        """
        pairs = zip(members, checksums, strict=True)
        differing = [member for member, checksum in pairs if checksum != checksums[0]]
        ids = {member.id for member in differing}
        new = ids - self.names
        if not self.names:
            self.since = version
        self.names, self.found = ids, len(ids)
        if not new:
            return []
        names = ", ".join(member.name for member in differing)
        text = (
            f"version {version}: the replicas of {names} differ from that of {members[0].name}, as happens "
            "on computers of different makes; they get its parameters when the epoch ends"
        )
        return [e.Note(text=text, warning=True)]

    def is_due(self, version: int) -> bool:
        """Return True if replicas have differed for `DRIFT_VERSIONS` versions, so that they should be
        replaced."""
        return bool(self.names) and version - self.since >= DRIFT_VERSIONS
