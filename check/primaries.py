"""Check the records of the fleet's primaries against each other, and against the snapshots that were taken since.

The newest record decides which locks an operation needs (snapshots/operations/majority.py). A record with fewer
primaries, or with other servers, would let two operations run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from cutline.check.report import Conflict
from cutline.check.times import SLACK_SECONDS
from cutline.snapshots.operations.majority import read_records
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.store_identity import BaselineRecord, baseline_key
from cutline.storage.ids import time_of_id
from cutline.storage.store import ObjectStore

PRIMARIES = "primaries"


class LockedPrimaries(Struct, frozen=True):
    """The primaries that the full snapshot `snapshot` was taken of: their system identifiers, by node.

    A check holds these of all snapshots, whose commits may take many megabytes each.
    """

    snapshot: str
    operation: str
    servers: Mapping[str, str]

    @classmethod
    def of(cls, full: FullSnapshot) -> LockedPrimaries:
        """Return the primaries of a full snapshot."""
        servers = {one.node: one.system_identifier for one in full.baseline if one.backup_of is None}
        return cls(full.snapshot, full.operation, servers)


def check_primaries(store: ObjectStore, snapshots: Iterable[LockedPrimaries]) -> list[Conflict]:
    """Return the conflicts of all records of primaries, and of the newest with each of the snapshots."""
    try:
        records = read_records(store)
    except ManifestError as error:
        return [Conflict(PRIMARIES, error.message, object=str(error.details["object"]))]
    snapshots = list(snapshots)
    if not records:
        # Every create records the primaries that it has locked, before it begins.
        detail = f"there is no record of the primaries, which {baseline_key(1)} should contain"
        return [Conflict(PRIMARIES, detail, object=baseline_key(1))] if snapshots else []
    conflicts = [
        Conflict(PRIMARIES, detail, object=baseline_key(number))
        for number, record in records.items()
        for detail in _follows(records.get(number - 1), record, number)
    ]
    newest = max(records)
    return conflicts + [
        Conflict(PRIMARIES, detail, object=baseline_key(newest))
        for locked in snapshots
        for detail in _compare(records[newest], locked, is_first=newest == 1)
    ]


def _follows(before: BaselineRecord | None, record: BaselineRecord, number: int) -> Iterator[str]:
    if before is None:
        if number > 1:
            yield f"record {number} of the primaries exists, but record {number - 1} is missing"
        return
    was, now = ({entry.node: entry.system_identifier for entry in one.primaries} for one in (before, record))
    if len(now) < len(was) and not record.forgotten:
        yield f"record {number} has {len(now)} primaries, fewer than the {len(was)} before, and forgets none"
    if record.primaries == before.primaries:
        yield f"record {number} has the same primaries as record {number - 1}"


def _compare(record: BaselineRecord, snapshot: LockedPrimaries, *, is_first: bool) -> Iterator[str]:
    """Yield how the record contradicts a full snapshot that was begun after it; every create compares both.

    No snapshot is older than the first record.
    """
    began, recorded = time_of_id(snapshot.operation), time_of_id(record.id)
    # A record gets its id shortly before the operation that stores it.
    is_later = began is not None and recorded is not None and began.timestamp() > recorded.timestamp() + SLACK_SECONDS
    if not is_first and not is_later:
        return
    known = {entry.node: entry.system_identifier for entry in record.primaries}
    name, locked = snapshot.snapshot, snapshot.servers
    if len(locked) > len(known):
        yield f"the newest record has {len(known)} primaries, but the later snapshot {name} has {len(locked)}"
    elif len(known.keys() & locked.keys()) * 2 <= len(known):
        yield f"the later snapshot {name} has at most half of the recorded primaries"
    for node in sorted(known.keys() & locked.keys()):
        if known[node] != locked[node]:
            yield (
                f"node {node} is recorded with system identifier {known[node]}, but the later snapshot {name}"
                f" was taken from {locked[node]}"
            )
