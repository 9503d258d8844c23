"""The database that a shard's rows are loaded into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fleet.config import Node
from fleet.tables.groups import Group
from snapshots.ddl.search_path import DEFAULT


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A database with its tables, and the groups that are loaded there, by number.

    `ledger` is the table of the load's ledger (restore/ledger.py).
    `roots` are the partitioned tables through which rows are loaded (restore/partition_roots.py), by group number.
    `search_path` is set while rows are loaded and views refreshed: functions that the tables use may depend on it.
    """

    node: Node
    groups: Mapping[int, Group]
    ledger: str
    roots: Mapping[int, str] = field(default_factory=dict)
    search_path: str = f"pg_catalog, {DEFAULT}"

    def select(self, numbers: Iterable[int]) -> LoadTarget:
        """The same database with only the groups of these `numbers`."""
        return replace(self, groups={one: self.groups[one] for one in numbers if one in self.groups})
