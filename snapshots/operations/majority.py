"""The primaries of the largest fleet that a store has served, and the majority of them that an operation must lock.

Two coordinators that each see only a part of the fleet can't both hold more than half of it. Records are numbered and
created once, so if two coordinators begin with an empty store, the second one is measured against the record of the
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
    """The locked nodes are not more than half of the largest fleet that the store has served."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The node ids of a recorded baseline's primaries; `number` is 0 if none is recorded yet."""

    number: int
    primaries: tuple[str, ...]


def read_baseline(store: ObjectStore) -> Baseline:
    """The baseline that counts now; if none is recorded yet, the largest among the committed snapshots."""
    names = (FILE.fullmatch(name) for name in store.list_children("baselines"))
    number = max((int(match[1]) for match in names if match), default=0)
    # A listing may be out of date.
    while store.exists(baseline_key(number + 1)):
        number += 1
    if number:
        record: BaselineRecord = read_document(store, baseline_key(number), BaselineRecord)
        return Baseline(number, tuple(entry.node for entry in record.primaries))
    primaries = [read_full(store, name).primaries for name in snapshot_names(store)]
    return Baseline(0, max(primaries, key=len, default=()))


def check_majority(baseline: Baseline, granted: Mapping[str, NodeIdentity]) -> None:
    """Raise MajorityMissingError unless more than half of the baseline's primaries granted their lock."""
    primaries = set(baseline.primaries)
    held, needed = primaries & granted.keys(), len(primaries) // 2 + 1
    if not primaries or len(held) >= needed:
        return
    missing = sorted(primaries - held)
    raise MajorityMissingError(
        f"{len(held)} of the {len(primaries)} primaries of the largest baseline granted their lock, and {needed} are"
        f" needed; missing: {', '.join(missing)}",
        hint="name all nodes of the fleet in fleet.toml; if the fleet has shrunk, and nothing else takes snapshots of"
        " the missing nodes: snapshot init --forget-nodes",
        details={"granted": sorted(granted), "baseline": sorted(primaries), "needed": needed, "missing": missing},
    )


def claim_majority(store: ObjectStore, granted: Mapping[str, NodeIdentity]) -> None:
    """Check the majority, and record the primaries whose lock was granted if they are more than ever before.

    The caller holds their locks. Raises MajorityMissingError.
    """
    while True:
        baseline = read_baseline(store)
        check_majority(baseline, granted)
        if baseline.number and len(granted) <= len(baseline.primaries):
            return
        if _record(store, baseline.number + 1, granted, forgotten=()):
            return


def forget_nodes(store: ObjectStore, granted: Mapping[str, NodeIdentity]) -> list[str]:
    """Record these primaries as the baseline that counts from now on; return the node ids that it drops.

    Only an operator's explicit command makes the baseline smaller. The caller holds the locks of `granted`.
    """
    while True:
        baseline = read_baseline(store)
        forgotten = sorted(set(baseline.primaries) - granted.keys())
        if not forgotten or _record(store, baseline.number + 1, granted, tuple(forgotten)):
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
