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

    `ledger` is the table of the load's ledger (restore/rows/ledger.py).
    `roots` are the partitioned tables through which rows are loaded (restore/rows/partition_roots.py), by group number.
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


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The databases to load, by shard; `shards` are all of the restore, also those that are loaded already.

    `chosen` are by node the numbers of the groups whose rows are taken from its copy; standbys in it lend rows to their
    shards. Of a shard that is not in it, all rows are taken from the primary's copy. `parts` is `partitions_of` the
    session that began the restore. With the same of all three, Spark tasks of the same name load the same rows.
    """

    shards: tuple[str, ...]
    databases: Mapping[str, LoadTarget]
    parts: int
    chosen: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose copies are read: those of the shards, then the standbys."""
        return (*self.shards, *sorted(self.chosen.keys() - set(self.shards)))

    def target_of(self, node: str, shard: str) -> LoadTarget | None:
        """The shard's database with the groups whose rows are taken from the node's copy; None if it is loaded."""
        target, groups = self.databases.get(shard), self.chosen.get(node)
        return target if target is None or groups is None else target.select(groups)
