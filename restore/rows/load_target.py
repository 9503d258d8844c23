"""The databases that a shard's rows are loaded into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.tables.groups import Group
from cutline.fleet.tables.names import quote_identifier
from cutline.restore.ddl.function_paths import path_of_owner
from cutline.restore.routing.table_routes import SourceRoutes

# Of each table its owner, and whether its constraints or generated columns call functions that have no search_path of
# their own. Those of a domain may be called for any table.
OWNERS_QUERY = """
WITH functions AS (
    SELECT p.oid FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
     WHERE p.oid >= 16384 AND l.lanname NOT IN ('c', 'internal') AND p.prosqlbody IS NULL
       AND NOT EXISTS (SELECT FROM unnest(p.proconfig) AS of (setting) WHERE setting ^@ 'search_path=')),
callers AS (
    SELECT d.classid, d.objid FROM pg_depend d
     WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid IN (SELECT oid FROM functions)),
tables AS (
    SELECT objid AS oid FROM callers WHERE classid = 'pg_class'::regclass
    UNION SELECT k.conrelid FROM pg_constraint k
            JOIN callers c ON c.classid = 'pg_constraint'::regclass AND c.objid = k.oid
    UNION SELECT a.adrelid FROM pg_attrdef a JOIN callers c ON c.classid = 'pg_attrdef'::regclass AND c.objid = a.oid)
SELECT n.nspname, c.relname, quote_ident(pg_get_userbyid(c.relowner)),
       c.oid IN (SELECT oid FROM tables) OR pg_partition_root(c.oid) IN (SELECT oid FROM tables)
       OR 0 IN (SELECT oid FROM tables)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r'
"""
FUNCTION_SCHEMAS_QUERY = """
SELECT quote_ident(nspname) FROM pg_namespace
 WHERE oid IN (SELECT pronamespace FROM pg_proc WHERE oid >= 16384) AND nspname <> 'information_schema' ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A database with its tables, and the groups that are loaded there, by number.

    `ledger` is the table of the load's ledger (restore/rows/ledger.py).
    `roots` are the partitioned tables through which rows are loaded (restore/rows/partition_roots.py), by group number.
    `search_paths` are set while the rows of a group, by its number, are loaded: the table's functions may depend on it.
    `wider_paths` are set instead if a function of the table does not find a name; tables without functions have none.
    `is_in_use`: others use the tables, too, and may have written rows; so no table is emptied.
    `task_sessions` are the most that tasks may have on its node at a time.
    """

    node: Node
    groups: Mapping[int, Group]
    ledger: str
    roots: Mapping[int, str] = field(default_factory=dict)
    search_paths: Mapping[int, str] = field(default_factory=dict)
    wider_paths: Mapping[int, str] = field(default_factory=dict)
    is_in_use: bool = False
    task_sessions: int = 1

    def select(self, numbers: Iterable[int]) -> LoadTarget:
        """The same database with only the groups of these `numbers`."""
        return replace(self, groups={one: self.groups[one] for one in numbers if one in self.groups})


@dataclass(frozen=True, slots=True)
class Feed:
    """Where the rows of one source go: to the databases in `targets`, by the targets' numbers.

    The databases' groups are by the source's group numbers; their own numbers are those of the ledger. Without `routes`
    all rows go to the only target. With them, targets that are loaded already are missing, and their rows are left out.
    """

    targets: Mapping[int, LoadTarget]
    routes: SourceRoutes | None = None

    @property
    def nodes(self) -> set[str]:
        """The ids of the databases' nodes."""
        return {one.node.id for one in self.targets.values()}

    def select(self, numbers: Collection[int]) -> Feed:
        """The same with only the groups of these `numbers`; targets that have none of them are left out."""
        chosen = {number: one.select(numbers) for number, one in self.targets.items()}
        routes = self.routes.select(numbers) if self.routes else None
        return Feed({number: one for number, one in chosen.items() if one.groups}, routes)


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """Where the rows of the `shards`, all sources of the restore, go: the feed of each that is to be loaded, by shard.

    `chosen` are by node the numbers of the groups whose rows are taken from its copy; standbys in it lend rows to their
    shards. Of a shard that is not in it, all rows are taken from the primary's copy. `parts` is into how many parts the
    changed rows of each source are divided, or those of all sources together if they are routed (restore/rows/jobs.py).
    With the same of all three, Spark tasks of the same name load the same rows.
    """

    shards: tuple[str, ...]
    feeds: Mapping[str, Feed]
    parts: int
    chosen: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose copies are read: those of the shards, then the standbys."""
        return (*self.shards, *sorted(self.chosen.keys() - set(self.shards)))

    @property
    def is_routed(self) -> bool:
        """Whether each row may go to any target."""
        return any(feed.routes for feed in self.feeds.values())

    @property
    def task_sessions(self) -> dict[str, int]:
        """By the target's node the most sessions that tasks may have there at a time."""
        return {one.node.id: one.task_sessions for feed in self.feeds.values() for one in feed.targets.values()}

    def feed_of(self, node: str, shard: str) -> Feed | None:
        """Where the rows go that are taken from the node's copy, which is of the shard; None if nowhere."""
        feed, groups = self.feeds.get(shard), self.chosen.get(node)
        chosen = feed if feed is None or groups is None else feed.select(groups)
        return chosen if chosen and chosen.targets else None


class LoadPaths(NamedTuple):
    """The values of `search_paths` and `wider_paths` of a LoadTarget."""

    search_paths: dict[int, str]
    wider_paths: dict[int, str]


def find_load_paths(connection: psycopg.Connection[Any], groups: Iterable[Group], path: str | None) -> LoadPaths:
    """The search_path of a session of each table's owner, where `path` is set for the database, and a wider one.

    Sessions of the source may have had any. A wider one has the schemas of the table and of all functions after it, so
    that names which are found without it stand for what they did.
    """
    tables = {(schema, table): facts for schema, table, *facts in connection.execute(OWNERS_QUERY)}
    schemas = [schema for (schema,) in connection.execute(FUNCTION_SCHEMAS_QUERY)]
    found = LoadPaths({}, {})
    for group in groups:
        owner, has_functions = tables.get((group.schema, group.table), (None, False))
        if owner is None:
            continue
        found.search_paths[group.number] = own = path_of_owner(path, owner)
        if has_functions:
            found.wider_paths[group.number] = ", ".join([own, quote_identifier(group.schema), *schemas])
    return found
