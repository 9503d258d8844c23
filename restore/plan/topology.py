"""The topology of a restore: its sources, targets and routes, and the definitions that all sources must share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.messages import join_some, list_some
from cutline.fleet.table_names import table_name
from cutline.nodes.groups import Group
from cutline.restore.ddl.ddl import show_name
from cutline.restore.ddl.entries import SYSTEM_SCHEMAS, is_own_publication, read_archive
from cutline.restore.ddl.role_statements import REMARKS
from cutline.restore.plan.copies import Wanted, explain_damage
from cutline.restore.rows.load import Feed, LoadTarget, LoadTargets
from cutline.restore.scope.table_routes import RouteKind, SourceRoutes, TableRoute, parse_route, resolve_routes
from cutline.snapshots.ddl.ddl_archive import PRIVILEGES, ArchiveEntry, statements_of_entry
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Sequence as StoredSequence
from cutline.snapshots.records.commit import count_by_node
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError

NAMED_MAX = 20
# pg_restore runs these entries only with --create.
OF_DATABASE = ("DATABASE", "DATABASE PROPERTIES")
SETTINGS = ("encoding", "collate", "ctype", "locale_provider", "locale", "icu_rules")


class SourcesDifferError(RefusedError):
    """Shards whose rows go to the same databases have different definitions."""


class LargeObjectsUnroutedError(RefusedError):
    """The snapshot has large objects, which belong to no table and have no route."""


def check_sources(store: ObjectStore, chain: Chain, sources: Sequence[str]) -> None:
    """Raise SourcesDifferError, listing the differences, unless all sources have the definitions of the first.

    Compares the databases' encodings, locales and search_path, the tables, and the whole DDL with its owners. All other
    properties of the database or server are taken from the first source: see _is_of_server.
    """
    differences: list[str] = []
    first, *others = sources
    ddl = {source: _read_statements(store, chain, source) for source in sources if others}
    for other in others:
        differences += [
            f"database setting {setting}: {getattr(chain.baseline[first], setting)} on {first},"
            f" {getattr(chain.baseline[other], setting)} on {other}"
            for setting in SETTINGS
            if getattr(chain.baseline[first], setting) != getattr(chain.baseline[other], setting)
        ]
        tables = _compare_tables(chain.groups(first), chain.groups(other))
        named = {name for name, _ in tables}
        differences += [f"table {name} of {first} and {other}: {what}" for name, what in tables]
        differences += [
            f"{name} of {first} and {other}: {what}"
            for name, what in _compare(ddl[first], ddl[other])
            if name.removeprefix("TABLE ") not in named
        ]
    if differences:
        versions = " and ".join(sorted({str(chain.baseline[source].server_version // 10000) for source in sources}))
        raise SourcesDifferError(
            f"the definitions of {', '.join(sources)} differ, so their rows can't go to the same databases:"
            f" {join_some(differences, NAMED_MAX)}",
            hint=[
                "make the definitions the same, then take another increment: snapshot create NAME --incremental",
                *([f"PostgreSQL {versions} print some identical definitions differently"] if " " in versions else []),
                "or restore each shard to a target with its own id",
            ],
            details={"differences": differences},
        )


def compare_sources(
    store: ObjectStore, chain: Chain, sources: Sequence[str], wanted: Wanted
) -> ObjectDamagedError | None:
    """Compare as check_sources does; if damaged DDL can't be compared, return the error, with the losses it causes."""
    try:
        check_sources(store, chain, sources)
    except ObjectDamagedError as error:
        return explain_damage(store, chain, wanted, error)
    return None


def check_large_objects_routed(chain: Chain, sources: Iterable[str]) -> None:
    """Raise LargeObjectsUnroutedError if a source has large objects."""
    counts = {node: count for node, count in count_by_node(chain.full).items() if node in sources}
    if counts:
        places = ", ".join(f"{count} on {node}" for node, count in counts.items())
        raise LargeObjectsUnroutedError(
            f"snapshot {chain.name} has large objects ({places}), which can be restored only into a target with their"
            " shard's id",
            hint="restore the tables without large objects: --group 'SCHEMA.*'; or give the targets the shards' ids",
            details={"large_objects": counts},
        )


def _compare_tables(first: Iterable[Group], other: Iterable[Group]) -> list[tuple[str, str]]:
    return _compare(*({group.name: _definition(group) for group in groups} for groups in (first, other)))


def _definition(group: Group) -> object:
    """Return the properties that two shards' stored lines must share; oids are local, so types are given by name."""
    columns = [(column.name, column.type, column.type_modifier) for column in group.columns]
    return group.identity, group.key_width, columns


def _compare(first: Mapping[str, object], other: Mapping[str, object]) -> list[tuple[str, str]]:
    differences: list[tuple[str, str]] = []
    for name in sorted(first.keys() | other.keys()):
        if name not in other or name not in first:
            differences.append((name, f"exists only on the {'first' if name in first else 'second'}"))
        elif first[name] != other[name]:
            differences.append((name, "defined differently"))
    return differences


def _read_statements(store: ObjectStore, chain: Chain, source: str) -> dict[str, object]:
    """Return a source's DDL statements, keyed by the object that they define, without those that are not compared.

    Cutline's own publications are not compared: if two nodes have the same tables, it is possible that only one of them
    has a publication for tables that used to be append-only.
    """
    archive = read_archive(read_stored_ddl(store, chain, source))
    statements: dict[str, Counter[tuple[str, ...]]] = {}
    for entry in archive.entries:
        if is_own_publication(entry) or entry.kind in OF_DATABASE or _is_of_server(entry):
            continue
        statements.setdefault(_name_of(entry), Counter())[
            statements_of_entry(archive.body, entry), entry.tablespace, entry.access, entry.owner
        ] += 1
    return {**statements, "setting search_path": archive.search_path}


def _is_of_server(entry: ArchiveEntry) -> bool:
    """Whether the entry is a comment, label or privilege on the database itself, or a privilege on a system object."""
    if entry.kind in (PRIVILEGES, *REMARKS):
        return entry.name.startswith("DATABASE ") or (entry.kind == PRIVILEGES and entry.schema in SYSTEM_SCHEMAS)
    return False


def _name_of(entry: ArchiveEntry) -> str:
    return show_name(f"{entry.kind} {f'{entry.schema}.' if entry.schema else ''}{entry.name}")


class ShownRoute(NamedTuple):
    """A table and its route, as shown in reports."""

    table: str
    route: str


class Topology(Struct, frozen=True):
    """Sends the rows of all `sources` to `targets` (node ids in the order they appear in the target's file).

    `routes` are keyed by table name. The DDL and settings are taken from the first source. `others` are further ids by
    which routes and rows may name the targets.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    routes: Mapping[str, TableRoute]
    others: Mapping[str, str] = field(default_factory=dict)

    def routes_of(self, chain: Chain, source: str) -> SourceRoutes:
        """Return the routes, keyed by a source's group numbers."""
        by_group = {
            group.number: self.routes[group.name] for group in chain.groups(source) if group.name in self.routes
        }
        return SourceRoutes(source, source == self.sources[0], self.targets, by_group, self.others)

    def sequences(self, chain: Chain) -> tuple[StoredSequence, ...]:
        """Return each sequence's value for all targets: the furthest in any source, in the increment's direction."""
        furthest: dict[tuple[str, str], StoredSequence] = {}
        for source in self.sources:
            for sequence in chain.sequences(source):
                name = sequence.schema, sequence.name
                if name not in furthest or sequence.reach > furthest[name].reach:
                    furthest[name] = sequence
        return tuple(furthest.values())

    def shares(self, source: str, target: str) -> dict[str, float]:
        """Return the fraction of a source's rows that a target gets, keyed by table name."""
        number, is_first = self.targets.index(target), source == self.sources[0]
        return {name: route.share(number, len(self.targets), is_first=is_first) for name, route in self.routes.items()}

    def shown(self, groups: Sequence[Group]) -> list[ShownRoute]:
        """Return the routes of the restored tables, in table order."""
        return [ShownRoute(group.name, self.routes[group.name].text) for group in groups]

    def remarks(self, chain: Chain, groups: Sequence[Group]) -> list[str]:
        """Describe where rows and sequences go, one line per fact; `groups` are the restored groups."""
        lines = [f"{' + '.join(self.sources)} go to {', '.join(self.targets)}"]
        several = len(self.sources) > 1
        if several:
            lines.append(
                f"database settings and privileges, and privileges on PostgreSQL's own objects, are taken from"
                f" {self.sources[0]}"
            )
        if self.sequences(chain):
            what = "the furthest value of all sources" if several else "the source's value"
            lines.append(f"sequences are set to {what} on every target")
        equal = [self.routes[group.name].table for group in groups if self.routes[group.name].kind is RouteKind.ALL]
        if equal and several:
            lines.append(f"rows taken from {self.sources[0]}, if equal on all sources: {list_some(equal, NAMED_MAX)}")
        added = [group.name for group in groups if group.is_multiset and group.name not in equal]
        if added and several:
            lines.append(f"rows of all sources combined, because the tables have no key: {list_some(added, NAMED_MAX)}")
        return lines


def plan_topology(
    sources: Sequence[str],
    targets: Sequence[str],
    groups: Sequence[Group],
    words: Sequence[str],
    others: Mapping[str, str],
) -> Topology:
    """Resolve the user's routes, given as `words`; `groups` are the first source's restored groups.

    `others` are as in Topology.

    Raises UsageError.
    """
    named = (parse_route(word) for word in words)
    routes = [replace(route, node=others.get(route.node, route.node)) for route in named]
    return Topology(tuple(sources), tuple(targets), resolve_routes(groups, routes, tuple(targets)), others)


def find_feeds(
    chain: Chain, shards: tuple[str, ...], topology: Topology | None, databases: Mapping[str, LoadTarget], parts: int
) -> LoadTargets:
    """Return the feeds of the databases to load.

    They are keyed by source if there is a topology; otherwise by shard, because each of the `shards` has its own
    target.
    """
    if topology is None:
        feeds = {shard: Feed({number: databases[shard]}) for number, shard in enumerate(shards) if shard in databases}
        return LoadTargets(shards, feeds, parts)
    numbered = {number: databases[target] for number, target in enumerate(topology.targets) if target in databases}
    routed: dict[str, Feed] = {}
    for source in topology.sources:
        targets = {number: _for_source(chain, source, database) for number, database in numbered.items()}
        routes = topology.routes_of(chain, source)
        refused = {
            number: frozenset(groups)
            for number, target in targets.items()
            if (groups := routes.by_group.keys() - target.groups.keys())
        }
        routed[source] = Feed(targets, replace(routes, refused=refused))
    return LoadTargets(topology.sources, routed, parts)


def _for_source(chain: Chain, source: str, database: LoadTarget) -> LoadTarget:
    """Return the database with its groups numbered as in the source's rows."""
    by_name = {group.name: group for group in database.groups.values()}
    return replace(
        database, groups={group.number: by_name[group.name] for group in chain.groups(source) if group.name in by_name}
    )


IDENTIFIER = r'"(?:[^"]|"")+"'
RELATION = rf"{IDENTIFIER}\.{IDENTIFIER}"
COLUMNS = rf"{IDENTIFIER}(?:, {IDENTIFIER})*"
# The form that pg_dump writes, with every identifier quoted. A foreign key in a different form (PERIOD) is left out.
DEFINITION = re.compile(
    rf"ALTER TABLE (?:ONLY )?(?P<table>{RELATION})\s+ADD CONSTRAINT {IDENTIFIER} FOREIGN KEY \((?P<columns>{COLUMNS})\)"
    rf" REFERENCES (?P<other>{RELATION})\((?P<others>{COLUMNS})\).*",
    re.DOTALL,
)


def keeps_foreign_key(topology: Topology, statement: str) -> bool:
    """Whether the routes send every row to the target that gets the row it references.

    They do if there is only one target, if the referenced table is on every target, if both tables are on the same
    target, or if both are divided in the same way by columns that the key equates.
    """
    if len(topology.targets) == 1:
        return True
    parts = DEFINITION.fullmatch(statement)
    if parts is None:
        return False
    own, other = _route(topology.routes, parts["table"]), _route(topology.routes, parts["other"])
    if own is None or other is None:
        return False
    if other.kind is RouteKind.ALL:
        return True
    if own.divides_like != other.divides_like:
        return False
    if own.kind is RouteKind.NODE:
        return True
    pairs = zip(_names(parts["columns"]), _names(parts["others"]), strict=True)
    return (own.column, other.column) in pairs


def _route(routes: Mapping[str, TableRoute], relation: str) -> TableRoute | None:
    """Return the route of the table with this quoted name; a partitioned table has no route."""
    return routes.get(table_name(*_names(relation)))


def _names(text: str) -> list[str]:
    return [identifier[1:-1].replace('""', '"') for identifier in re.findall(IDENTIFIER, text)]
