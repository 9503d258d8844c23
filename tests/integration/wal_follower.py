"""A slot, the copy taken in its exported snapshot, and a naive fold of its archive, for tests of decoding.

The fold is a Python loop over rows on purpose: it shares no code with the fold that it tests.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from cutline.fleet.config import GroupRules, Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Group, column_list, number_groups, qualify, read_tables
from cutline.nodes.publications import ensure_publications, publication_names
from cutline.snapshots.base_copy.copy_slots import open_exported
from cutline.storage.location import StoreLocation
from cutline.wal.drain.drain import drain
from cutline.wal.drain.drain_task import DrainReport, DrainTask
from cutline.wal.drain.slots import create_exported_slot
from cutline.wal.segments.archive import Definition, check_contiguous

FLEET = "test"
RULES = GroupRules(append_only=("*.append_only",))


def prepare_groups(connection: psycopg.Connection[Any]) -> dict[str, Group]:
    """Publish all admissible tables; return their groups by name."""
    tables = number_groups({"s": read_tables(connection, RULES)}, 100)["s"]
    ensure_publications(connection, FLEET, tables)
    return {table.group.name: table.group for table in tables if table.is_admissible}


def copy_lines(connection: psycopg.Connection[Any], group: Group) -> list[bytes]:
    """The group's current rows as PostgreSQL's own COPY prints them."""
    query = f"COPY (SELECT {column_list(group)} FROM ONLY {qualify(group)}) TO STDOUT"
    with connection.cursor().copy(query.encode()) as copy:
        return list(io.BytesIO(b"".join(bytes(part) for part in copy)))


@dataclass(slots=True)
class Follower:
    """The archive of one slot on one node. `base` has the lines of each group in the slot's exported snapshot."""

    task: DrainTask
    groups: dict[str, Group]
    base: dict[str, list[bytes]]
    reports: list[DrainReport] = field(default_factory=list)

    def drain(self, finish: int) -> DrainReport:
        """Drain up to `finish`. The task does not know earlier segments; the drain finds them in the store."""
        self.task = replace(self.task, finish=Lsn(finish))
        report = drain(self.task)
        self.reports.append(report)
        return report

    def drain_fully(self, finish: int) -> DrainReport:
        """Drain up to `finish`, and assert that there is no problem and that the archive reaches it without a hole."""
        report = self.drain(finish)
        assert report.problem is None, report.problem
        check_contiguous(self.task.node.id, self.task.base, [one.segment for one in report.segments])
        assert report.segments[-1].segment.through == finish
        return report

    def rows(self) -> list[dict[str, Any]]:
        """Everything in the archive, changes and events."""
        store = self.task.store.open()
        tables = [pq.read_table(pa.BufferReader(store.read(key))) for key in store.list("")]
        return [row for table in tables for row in table.to_pylist()]

    def changes(self) -> list[dict[str, Any]]:
        """The archived changes, in order."""
        found = [row for row in self.rows() if chr(row["op"]) in "IUuDT"]
        return sorted(found, key=lambda row: (row["lsn"], row["seq"], row["group"]))

    def events(self) -> list[dict[str, Any]]:
        """The archived events."""
        return [row for row in self.rows() if chr(row["op"]) in "CPKRM"]

    def state(self) -> dict[str, list[bytes]]:
        """The base with the changes of all transactions that were not rolled back: sorted lines by group."""
        prepared = {row["lsn"]: row for row in self.events() if chr(row["op"]) == "P"}
        rolled_back = {row["lsn"] for row in self.events() if chr(row["op"]) == "R"}
        left_out = {lsn for lsn, row in prepared.items() if row["end_lsn"] in rolled_back}
        folds = {group.number: Fold(group, self.base[name]) for name, group in self.groups.items()}
        for change in self.changes():
            if change["lsn"] not in left_out:
                folds[change["group"]].apply(change)
        return {name: folds[group.number].lines() for name, group in self.groups.items()}


class Fold:
    """One group's rows: lines by key, or a multiset of lines if the group has no key."""

    def __init__(self, group: Group, base: list[bytes]) -> None:
        self.group = group
        self.bag = Counter(base if group.is_multiset else ())
        self.rows = {} if group.is_multiset else {self.key(line): line for line in base}
        self.moved: dict[bytes, bytes] = {}

    def key(self, line: bytes) -> bytes:
        return b"\t".join(line[:-1].split(b"\t")[: self.group.key_width])

    def apply(self, change: dict[str, Any]) -> None:
        op, key, row = chr(change["op"]), change["key"], change["row"]
        if op == "T":
            self.bag.clear()
            self.rows.clear()
        elif self.group.is_multiset:
            assert key == b""
            self.bag[row] += 1 if op == "I" else -1
            assert self.bag[row] >= 0
        elif op == "D":
            deleted = self.rows.pop(key)
            if row:
                self.moved[row.removesuffix(b"\n")] = deleted
        else:
            assert self.key(row) == key
            self.rows[key] = row if op == "U" else self.fill_unchanged(key, row)

    def fill_unchanged(self, key: bytes, row: bytes) -> bytes:
        before = self.moved.pop(key, None) or self.rows[key]
        values = zip(row[:-1].split(b"\t"), before[:-1].split(b"\t"), strict=True)
        return b"\t".join(old if new == b"\\u" else new for new, old in values) + b"\n"

    def lines(self) -> list[bytes]:
        return sorted(self.bag.elements()) if self.group.is_multiset else sorted(self.rows.values())


def follow(node: Node, primary: Node, groups: dict[str, Group], slot: str, store_url: str) -> Follower:
    """Create a slot on `node` and copy the groups in its exported snapshot."""
    exported = create_exported_slot(node, primary, slot, 60)
    try:
        with open_exported(node, exported.snapshot) as connection:
            base = {name: copy_lines(connection, group) for name, group in groups.items()}
    finally:
        exported.connection.close()
    task = DrainTask(
        node=node, slot=slot, publications=publication_names(FLEET), snapshot="nightly", archive=slot,
        operation="op", definitions=tuple(Definition(0, group) for group in groups.values()), global_id_form="exact",
        base=exported.position, last=None, finish=Lsn(0), store=StoreLocation(store_url),
    )  # fmt: skip
    return Follower(task, groups, base)
