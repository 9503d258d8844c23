"""The primaries of the largest fleet that a store has served, and the majority of them that an operation must lock.

Two commands that each see only a part of the fleet can't both hold more than half of it. Records are numbered and
created once, so if two commands begin with an empty store, the second one is measured against the record of the
first. Each record has more primaries than the previous one, except a record that an operator requested (forget_nodes).
The newest record counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from fleet.nodes.baseline import NodeIdentity
from snapshots.records.baseline_record import BaselineRecord, RecordedPrimary, baseline_key
from snapshots.records.commits import read_full, snapshot_names
from snapshots.records.documents import read_document, seal
from storage.errors import RefusedError
from storage.ids import new_operation_id
from storage.store import ObjectExistsError, ObjectStore
from storage.storing import create_or_find

FILE = re.compile(r"(\d{16})\.json")


class MajorityMissingError(RefusedError):
    """The locked nodes are not more than half of the recorded primaries."""


@dataclass(frozen=True, slots=True)
class RecordedPrimaries:
    """The node ids of the primaries in a record; `number` is 0 if none is stored yet."""

    number: int
    primaries: tuple[str, ...]


def read_recorded_primaries(store: ObjectStore) -> RecordedPrimaries:
    """Read the newest record; if there is none, the primaries of the largest fleet among the committed snapshots."""
    names = (FILE.fullmatch(name) for name in store.list_children("baselines"))
    number = max((int(match[1]) for match in names if match), default=0)
    # A listing may be out of date.
    while store.exists(baseline_key(number + 1)):
        number += 1
    if number:
        record: BaselineRecord = read_document(store, baseline_key(number), BaselineRecord)
        return RecordedPrimaries(number, tuple(entry.node for entry in record.primaries))
    primaries = [read_full(store, name).primaries for name in snapshot_names(store)]
    return RecordedPrimaries(0, max(primaries, key=len, default=()))


def check_majority(recorded: RecordedPrimaries, granted: Mapping[str, NodeIdentity]) -> None:
    """Raise MajorityMissingError unless more than half of the recorded primaries granted their lock."""
    primaries = set(recorded.primaries)
    held, needed = primaries & granted.keys(), len(primaries) // 2 + 1
    if not primaries or len(held) >= needed:
        return
    missing = sorted(primaries - held)
    raise MajorityMissingError(
        f"{len(held)} of the {len(primaries)} recorded primaries granted their lock, and {needed} are needed;"
        f" missing: {', '.join(missing)}",
        hint="name all nodes of the fleet in fleet.toml; if the fleet has shrunk, and nothing else takes snapshots of"
        " the missing nodes: snapshot init --forget-nodes",
        details={"granted": sorted(granted), "baseline": sorted(primaries), "needed": needed, "missing": missing},
    )


def claim_majority(store: ObjectStore, granted: Mapping[str, NodeIdentity]) -> None:
    """Check the majority, and record the primaries whose lock was granted if they are more than ever before.

    The caller holds their locks. Raises MajorityMissingError.
    """
    while True:
        recorded = read_recorded_primaries(store)
        check_majority(recorded, granted)
        if recorded.number and len(granted) <= len(recorded.primaries):
            return
        if _record(store, recorded.number + 1, granted, forgotten=()):
            return


def forget_nodes(store: ObjectStore, granted: Mapping[str, NodeIdentity]) -> list[str]:
    """Record these primaries if the newest record has others too; return the node ids that this drops.

    No other command makes the record smaller. The caller holds the locks of `granted`.
    """
    while True:
        recorded = read_recorded_primaries(store)
        forgotten = sorted(set(recorded.primaries) - granted.keys())
        if not forgotten or _record(store, recorded.number + 1, granted, tuple(forgotten)):
            return forgotten


def _record(store: ObjectStore, number: int, granted: Mapping[str, NodeIdentity], forgotten: tuple[str, ...]) -> bool:
    """Create the record; return False if its number is taken."""
    primaries = tuple(RecordedPrimary(node, identity.system_identifier) for node, identity in granted.items())
    record = BaselineRecord(new_operation_id(datetime.now(UTC)), primaries, forgotten)
    try:
        # The record is correct even if the put arrives after this command has failed: the locks were granted.
        create_or_find(store, baseline_key(number), seal(record))
    except ObjectExistsError:
        return False
    return True
