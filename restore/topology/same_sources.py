"""Compare the definitions of several sources, whose rows go to the same databases: they must be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cutline.fleet.some_names import join_some
from cutline.fleet.tables.groups import Group
from cutline.restore.copies.choice import Wanted, explain_damage
from cutline.restore.ddl.archive import SYSTEM_SCHEMAS, is_own_publication, read_archive
from cutline.restore.ddl.ddl import show_name
from cutline.restore.ddl.pg_restore import REMARKS
from cutline.snapshots.ddl.archive import PRIVILEGES, ArchiveEntry, statements_of_entry
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.large_objects import count_by_node
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError

NAMED_MAX = 20
# What pg_restore runs only with --create.
OF_DATABASE = ("DATABASE", "DATABASE PROPERTIES")
SETTINGS = ("encoding", "collate", "ctype", "locale_provider", "locale", "icu_rules")


class SourcesDifferError(RefusedError):
    """Shards whose rows are to be restored into the same databases have different definitions."""


class LargeObjectsUnroutedError(RefusedError):
    """The snapshot has large objects, which belong to no table and have no route."""


def check_sources(store: ObjectStore, chain: Chain, sources: Sequence[str]) -> None:
    """Raise SourcesDifferError, naming what differs, unless all sources have the definitions of the first.

    Compares the databases' encodings, locales and search_path, the tables, and the whole DDL with its owners. What else
    belongs to a database or its server is the first source's: see _is_of_server.
    """
    differences: list[str] = []
    first, *others = sources
    ddl = {source: _read_statements(store, chain, source) for source in sources if others}
    for other in others:
        differences += [
            f"database setting {one}: {getattr(chain.baseline[first], one)} on {first},"
            f" {getattr(chain.baseline[other], one)} on {other}"
            for one in SETTINGS
            if getattr(chain.baseline[first], one) != getattr(chain.baseline[other], one)
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
        versions = " and ".join(sorted({str(chain.baseline[one].server_version // 10000) for one in sources}))
        raise SourcesDifferError(
            f"the definitions of {', '.join(sources)} differ, so their rows can't go to the same databases:"
            f" {join_some(differences, NAMED_MAX)}",
            hint=[
                "make the definitions the same, and take another increment: snapshot create NAME --incremental",
                *([f"PostgreSQL {versions} print some equal definitions differently"] if " " in versions else []),
                "or restore each shard to a target with its own id",
            ],
            details={"differences": differences},
        )


def compare_sources(
    store: ObjectStore, chain: Chain, sources: Sequence[str], wanted: Wanted
) -> ObjectDamagedError | None:
    """Do what check_sources does; return the error for DDL that can't be compared, with what is lost without it."""
    try:
        check_sources(store, chain, sources)
    except ObjectDamagedError as error:
        return explain_damage(store, chain, wanted, error)
    return None


def check_large_objects_routed(chain: Chain, sources: Iterable[str]) -> None:
    """Raise LargeObjectsUnroutedError if a source has large objects."""
    counts = {node: count for node, count in count_by_node(chain.full).items() if node in sources}
    if counts:
        found = ", ".join(f"{count} on {node}" for node, count in counts.items())
        raise LargeObjectsUnroutedError(
            f"snapshot {chain.name} has large objects ({found}), and only a target with the id of their shard can have"
            " them",
            hint="restore the tables without large objects: --group 'SCHEMA.*'; or give the targets the shards' ids",
            details={"large_objects": counts},
        )


def _compare_tables(first: Iterable[Group], other: Iterable[Group]) -> list[tuple[str, str]]:
    return _compare(*({group.name: _definition(group) for group in groups} for groups in (first, other)))


def _definition(group: Group) -> object:
    """What makes stored lines of two shards the same; types by name, as their oids are those of a database."""
    columns = [(column.name, column.type, column.type_modifier) for column in group.columns]
    return group.identity, group.key_width, columns


def _compare(first: Mapping[str, object], other: Mapping[str, object]) -> list[tuple[str, str]]:
    """What differs by name, and how."""
    found: list[tuple[str, str]] = []
    for name in sorted(first.keys() | other.keys()):
        if name not in other or name not in first:
            found.append((name, f"only the {'first' if name in first else 'second'} has it"))
        elif first[name] != other[name]:
            found.append((name, "defined differently"))
    return found


def _read_statements(store: ObjectStore, chain: Chain, source: str) -> dict[str, object]:
    """The statements of a source's DDL by what they define, without what is not compared.

    Cutline's own publications are not: a node may have one for tables that were append-only, and another has not,
    though their tables are the same.
    """
    body = read_stored_ddl(store, chain, source)
    archive = read_archive(body)
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for entry in archive.entries:
        if is_own_publication(entry) or entry.kind in OF_DATABASE or _is_of_server(entry):
            continue
        found.setdefault(_name_of(entry), Counter())[
            statements_of_entry(body, entry), entry.tablespace, entry.access, entry.owner
        ] += 1
    return {**found, "setting search_path": archive.search_path}


def _is_of_server(entry: ArchiveEntry) -> bool:
    """Whether it is a remark or a privilege of the database itself, or a privilege of a PostgreSQL object."""
    if entry.kind in (PRIVILEGES, *REMARKS):
        return entry.name.startswith("DATABASE ") or (entry.kind == PRIVILEGES and entry.schema in SYSTEM_SCHEMAS)
    return False


def _name_of(entry: ArchiveEntry) -> str:
    return show_name(f"{entry.kind} {f'{entry.schema}.' if entry.schema else ''}{entry.name}")
