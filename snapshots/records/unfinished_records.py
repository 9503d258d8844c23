"""What a full snapshot stores while it copies tables, so that a repetition can resume it if it is interrupted.

All of it is in the operation's folder. The `UnfinishedBase` has what the base copy rests on: the slots' positions, and
the tables as they were then. Each task that has copied its page ranges stores a `CopiedRanges`. Each repetition that
resumes the operation stores a `Resumption` before it does anything else. From then on, a process
that had lost the fleet's lock doesn't commit any more. A process that is interrupted and can still write says so in a
`Failure` (snapshots/records/operation_records.py) whose number is that of the run: 1, or a resumption's and 1.

An attempt at a base copy that DDL has invalidated is followed by another one, with new slots, and with a new number in
the names of these documents. Only the documents of the last attempt count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from msgspec import UNSET, Struct, UnsetType, field, structs

from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Count, Record, Seconds, Time
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Group
from cutline.nodes.table_state import TableState
from cutline.snapshots.records.commit import NamedObject, ObjectList, StoredObject
from cutline.snapshots.records.documents import ManifestError, check_about, read_sealed, seal
from cutline.snapshots.records.operation_records import Failure, operation_key, read_failure
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

BASE_FORMAT = "cutline/unfinished-base/1"
COPIED_FORMAT = "cutline/copied-ranges/1"
RESUMPTION_FORMAT = "cutline/resumption/1"
THREADS_MAX = 8
SHOWN_TASKS_MAX = 500
BASE_NAME = re.compile(r"base-([1-9]\d{0,8})\.json")
COPIED_NAME = re.compile(r"copied-([1-9]\d{0,8})-(\d{6,9})\.json")
RESUMED_NAME = re.compile(r"resumed-([1-9]\d{0,8})\.json")


class UnfinishedBase(Record, frozen=True, kw_only=True, tag_field="schema", tag=BASE_FORMAT):
    """The plan of a base copy whose slots have been created, in `attempt`.

    `positions` are those of the slots, by node; `slots_complete_at`, `groups`, `tables`, `fingerprints`, `baseline`,
    `rules` and `global_id` are as in the commit of a full snapshot. `readers` are the standbys on which the tables of
    primaries are read, by primary. If it `is_only_primary`, no standby was wanted. `objects` is the DDL of all shards.
    """

    operation: str
    attempt: Count
    fleet_id: str = field(name="fleet")
    global_id: str
    baseline: tuple[NodeIdentity, ...]
    positions: dict[str, Lsn]
    slots_complete_at: dict[str, Lsn]
    readers: dict[str, str]
    is_only_primary: bool = field(name="only_primary")
    rules: GroupRules
    groups: dict[str, tuple[Group, ...]]
    tables: dict[str, tuple[TableState, ...]]
    fingerprints: dict[str, str]
    objects: tuple[StoredObject, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the snapshot, primaries and standbys."""
        return tuple(identity.node for identity in self.baseline)

    @property
    def sources(self) -> dict[str, list[str]]:
        """The nodes on which the tables of each shard are read."""
        sources: dict[str, list[str]] = defaultdict(list)
        for identity in self.baseline:
            if identity.node not in self.readers:
                sources[identity.backup_of or identity.node].append(identity.node)
        return sources


class CopiedRange(Record, frozen=True):
    """The pages of the table with this group `number` from `low` up to, but not including, `high` (None: its end)."""

    number: Count
    low: Count
    high: Count | None


class CopiedRanges(Record, frozen=True, kw_only=True, tag_field="schema", tag=COPIED_FORMAT):
    """What task `number` of the base copy's `attempt` has copied on `node`: the ranges, and its objects or their lists.

    Every object has rows of these ranges only. `rewritten` has the oids of tables that must be copied again, because
    they were rewritten while others were copied.
    """

    operation: str
    attempt: Count
    number: Count
    node: str
    ranges: tuple[CopiedRange, ...]
    objects: tuple[StoredObject, ...]
    lists: tuple[ObjectList, ...] = ()
    rewritten: tuple[Count, ...] = ()

    @property
    def numbers(self) -> set[int]:
        """The group numbers of the tables."""
        return {one.number for one in self.ranges}

    @property
    def entries(self) -> tuple[NamedObject, ...]:
        """`objects` and `lists`."""
        return (*self.objects, *self.lists)


class Resumption(Record, frozen=True, tag_field="schema", tag=RESUMPTION_FORMAT):
    """A repetition of the command, by the process with the label `by`, resumes the operation.

    `ran_seconds` is how long the earlier runs of the command took together, until the last that is known of each.
    """

    operation: str
    by: str
    resumed_at: Time
    ran_seconds: Seconds | UnsetType = UNSET


class UnfinishedCopy(Struct, frozen=True):
    """A base copy that was interrupted: its plan, the tables that are copied completely, and their entries.

    `groups` are these tables by shard. Rows of a table that is not complete are not in any of the `entries`.
    `rewritten` are the oids of those among them, by shard, that must be copied again nevertheless.
    """

    base: UnfinishedBase
    groups: Mapping[str, tuple[Group, ...]]
    entries: tuple[NamedObject, ...]
    rewritten: Mapping[str, set[int]]

    @property
    def share(self) -> CopiedShare:
        """How many tables of how many are copied, in all shards."""
        return CopiedShare(*(sum(map(len, groups.values())) for groups in (self.groups, self.base.groups)))

    @property
    def share_text(self) -> str:
        """How many tables of how many are copied, as text."""
        return self.share.text


class CopiedShare(NamedTuple):
    """How many `tables` of an interrupted base copy are copied completely, of how many, in all shards."""

    tables: int
    wanted: int

    @property
    def text(self) -> str:
        """How many tables of how many are copied, as text."""
        return f"{self.tables:,} of {self.wanted:,} tables are copied"


def base_name(attempt: int) -> str:
    """Return the name of the document with the plan of an attempt."""
    return f"base-{attempt}"


def copied_name(attempt: int, number: int) -> str:
    """Return the name of the document of a task."""
    return f"copied-{attempt}-{number:06d}"


def resumption_name(number: int) -> str:
    """Return the name of the document of a resumption (from 1)."""
    return f"resumed-{number}"


def interruption_name(number: int) -> str:
    """Return the name of the document that says how run `number` (from 1) was interrupted."""
    return f"interrupted-{number}"


def read_interruption(store: ObjectStore, operation: str, names: Collection[str]) -> Failure | None:
    """Return how the last run was interrupted; None if it runs, or could not say so; raises ManifestError.

    `names` are those of the operation's documents.
    """
    name = interruption_name(last_run(names))
    return read_failure(store, operation, name) if f"{name}.json" in names else None


def last_run(names: Iterable[str]) -> int:
    """Return the number of an operation's last run (from 1), by the `names` of its documents."""
    return 1 + max((int(found[1]) for name in names if (found := RESUMED_NAME.fullmatch(name))), default=0)


def read_resumption(store: ObjectStore, operation: str, number: int) -> Resumption:
    """Read a resumption (from 1); raises ManifestError and ObjectMissingError."""
    key = operation_key(operation, resumption_name(number))
    resumption: Resumption = read_sealed(store, key, Resumption)
    check_about(key, f"operation {resumption.operation}", f"operation {operation}")
    return resumption


def is_copy_record(name: str) -> bool:
    """Whether an operation's document with this name is the plan of a base copy, or what a task has copied."""
    return bool(BASE_NAME.fullmatch(name) or COPIED_NAME.fullmatch(name))


def is_unfinished_base(names: Collection[str]) -> bool:
    """Whether a base copy can be resumed, by the `names` of an operation's documents: a task of it has ended."""
    return bool(_copied_names(names, _last_attempt(names)))


def _last_attempt(names: Iterable[str]) -> int:
    return max((int(found[1]) for name in names if (found := BASE_NAME.fullmatch(name))), default=0)


def _copied_names(names: Iterable[str], attempt: int) -> list[str]:
    """Return the names, without `.json`, of the records that tasks of the attempt have stored."""
    return sorted(
        name.removesuffix(".json")
        for name in names
        if (found := COPIED_NAME.fullmatch(name)) and int(found[1]) == attempt
    )


def store_unfinished_base(store: ObjectStore, base: UnfinishedBase) -> None:
    """Store the plan of a base copy."""
    create_or_find(store, operation_key(base.operation, base_name(base.attempt)), seal(base))


def store_copied(store: ObjectStore, copied: CopiedRanges) -> None:
    """Store what a task has copied. Spark may repeat a task: what it stored first counts."""
    with suppress(ObjectExistsError):
        create_or_find(store, operation_key(copied.operation, copied_name(copied.attempt, copied.number)), seal(copied))


def forget_unfinished_base(store: ObjectStore, operation: str, attempt: int) -> None:
    """Delete the plan of an attempt whose slots are dropped. If that fails, new slots don't fit it."""
    with suppress(SnapshotError):
        store.delete(operation_key(operation, base_name(attempt)))


def forget_copied(store: ObjectStore, operation: str) -> None:
    """Delete what a base copy has stored to be resumed; the store's errors are ignored, because gc does the same."""
    with suppress(SnapshotError):
        names = store.list_children(f"operations/{operation}")
        stored = [
            name.removesuffix(".json") for name in names if BASE_NAME.fullmatch(name) or COPIED_NAME.fullmatch(name)
        ]
        with ThreadPoolExecutor(THREADS_MAX) as threads:
            list(threads.map(lambda name: store.delete(operation_key(operation, name)), stored))


def read_unfinished_base(store: ObjectStore, operation: str, names: Collection[str]) -> UnfinishedBase:
    """Read the plan of the last attempt; `names` are those of the operation's documents.

    Raises ManifestError and ObjectMissingError.
    """
    key = operation_key(operation, base_name(_last_attempt(names)))
    base: UnfinishedBase = read_sealed(store, key, UnfinishedBase)
    check_about(key, f"operation {base.operation}", f"operation {operation}")
    return base


def read_unfinished(
    store: ObjectStore, base: UnfinishedBase, names: Collection[str], without: Collection[str] = ()
) -> UnfinishedCopy:
    """Read what an interrupted base copy has copied, except on the standbys `without`.

    What a task has stored is left out if it can't be read. If a standby was read in the place of its primary, only
    tables that have been read on the primary since it failed are left of the shard.
    """
    base = structs.replace(
        base,
        readers={primary: reader for primary, reader in base.readers.items() if reader not in without},
        baseline=tuple(identity for identity in base.baseline if identity.node not in without),
        positions={node: position for node, position in base.positions.items() if node not in without},
    )

    def read(name: str) -> CopiedRanges | None:
        with suppress(ManifestError, ObjectMissingError):
            part: CopiedRanges = read_sealed(store, operation_key(base.operation, name), CopiedRanges)
            if (part.operation, part.attempt) == (base.operation, base.attempt) and part.node not in without:
                return part
        return None

    with ThreadPoolExecutor(THREADS_MAX) as threads:
        parts = threads.map(read, _copied_names(names, base.attempt))
        return complete_tables(base, (part for part in parts if part is not None))


def read_copied_share(store: ObjectStore, operation: str, names: Collection[str]) -> CopiedShare | None:
    """Return how much of an interrupted base copy is kept, for an operation that is only shown.

    None if that can't be read, or would take more than SHOWN_TASKS_MAX requests. `names` are those of the operation's
    documents.
    """
    if len(_copied_names(names, _last_attempt(names))) > SHOWN_TASKS_MAX:
        return None
    try:
        return read_unfinished(store, read_unfinished_base(store, operation, names), names).share
    except (ManifestError, ObjectMissingError):
        return None


def complete_tables(base: UnfinishedBase, parts: Iterable[CopiedRanges]) -> UnfinishedCopy:
    """Return the tables that are copied completely on all nodes on which their shard is read."""
    by_node: dict[str, list[CopiedRanges]] = {node: [] for sources in base.sources.values() for node in sources}
    for part in parts:
        # If the standby that is read in the place of a primary failed, the primary was read as well.
        if part.node in by_node:
            by_node[part.node].append(part)
    numbers: dict[str, set[int]] = {}
    for shard, sources in base.sources.items():
        complete = {group.number for group in base.groups[shard]}
        before = None
        # An object may have rows of several tables: if one of them is not complete, none of them can be used.
        while complete != before:
            before = complete
            for node in sources:
                by_node[node] = [part for part in by_node[node] if part.numbers <= complete]
                complete = complete & _complete_numbers(by_node[node])
        numbers[shard] = complete
    rewritten = {
        shard: {oid for node in sources for part in by_node[node] for oid in part.rewritten}
        for shard, sources in base.sources.items()
    }
    return UnfinishedCopy(
        base,
        {
            shard: tuple(group for group in groups if group.number in numbers[shard])
            for shard, groups in base.groups.items()
        },
        (*base.objects, *(entry for found in by_node.values() for part in found for entry in part.entries)),
        {shard: oids for shard, oids in rewritten.items() if oids},
    )


def _complete_numbers(parts: Iterable[CopiedRanges]) -> set[int]:
    """Return the tables whose ranges reach from the first page to the end without a gap."""
    ranges: dict[int, dict[int, int | None]] = defaultdict(dict)
    for part in parts:
        for one in part.ranges:
            ranges[one.number][one.low] = one.high
    complete: set[int] = set()
    for number, ends in ranges.items():
        at: int | None = 0
        while at is not None and at in ends:
            at = ends.pop(at)
        if at is None:
            complete.add(number)
    return complete
