"""What the DDL requires of a target's server: extensions, tablespaces, locales, lz4 and disk space.

The checks create nothing. The server's version is checked in target.py. Free space is known only for servers on this
machine, because no program of ours runs on others. A server is on this machine if the files in its data directory match
its system identifier, port and start time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct, field

from cutline.fleet.config import Node
from cutline.fleet.messages import list_some, name_nodes
from cutline.fleet.units import size_text
from cutline.nodes.baseline import ICU, LIBC, NodeIdentity
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.encodings import RAW, raw_bytes, raw_text
from cutline.restore.targets.obstacles import Obstacles, TargetLacksError
from cutline.snapshots.ddl.ddl_archive import EXTENSION, ArchiveEntry
from cutline.snapshots.records.commit import DatabaseFacts, UsedCollation
from cutline.storage.errors import RefusedError

EXTENSIONS_QUERY = """
SELECT e.name, e.default_version, array_agg(v.version ORDER BY v.version),
       bool_or((v.trusted OR NOT v.superuser) AND v.version = e.default_version)
  FROM pg_available_extensions e JOIN pg_available_extension_versions v USING (name) GROUP BY 1, 2
"""
TABLESPACES_QUERY = "SELECT namesend(spcname) FROM pg_tablespace"
COLLATIONS_QUERY = "SELECT collname FROM pg_collation WHERE collnamespace = 'pg_catalog'::regnamespace"
# This function does not exist before PostgreSQL 17. An ICU collation may exist without ICU support (16 has one), but
# then it has no version.
ICU_VERSION = 170000
HAS_ICU_QUERY = "SELECT icu_unicode_version() IS NOT NULL"
HAS_ICU_COLLATIONS_QUERY = """
SELECT EXISTS (SELECT FROM pg_collation WHERE collprovider = 'i' AND pg_collation_actual_version(oid) IS NOT NULL)
"""
# A server built without lz4 does not offer this value.
HAS_LZ4_QUERY = "SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
NAMED_MAX = 5
WITHOUT = "restore without them: --allow-refused-ddl"
DRILL_WITHOUT = "drill without them: --allow-refused-ddl"
# A server allows these extensions only in the one database that a setting names.
OF_ONE_DATABASE = frozenset({"pg_cron"})
INSTALL = "install their packages on the target's machine, then repeat the command"
# Setting any locale parameter tests whether the machine has a locale (PostgreSQL manual, "Locale Support").
TRY_LOCALE = "SELECT set_config('lc_monetary', %s, true)"


def check_extensions(
    node: Node,
    connection: psycopg.Connection[Any],
    entries: Iterable[ArchiveEntry],
    facts: DatabaseFacts | None,
    obstacles: Obstacles,
    allowed: Collection[str] | None = None,
    install: str = INSTALL,
    *,
    allows_refused: bool = False,
) -> frozenset[str]:
    """Add an obstacle for the extensions that the server lacks, and warn of version differences.

    `allowed` is given for drills: an extension that is neither trusted nor in `allowed` is then an obstacle, because a
    superuser would create it. An extension in OF_ONE_DATABASE is also an obstacle, because a drill's databases have
    different names. `install` is the hint for missing extensions. With `allows_refused`, none of these extensions are
    obstacles; the restore leaves them out. Returns the names of all these extensions.

    CREATE EXTENSION, as written by pg_dump, uses the server's default version. A different version is not an obstacle,
    because the DDL is rehearsed before any row is loaded, but a different version may interpret rows differently.
    """
    rows = connection.execute(EXTENSIONS_QUERY).fetchall()
    available = {name: (default, set(versions)) for name, default, versions, _ in rows}
    trusted = {name for name, *_, is_trusted in rows if is_trusted}
    versions = facts.extensions if facts else {}
    names = sorted({entry.name for entry in entries if entry.kind == EXTENSION})
    alone = [name for name in names if allowed is not None and name in OF_ONE_DATABASE]
    ordinary = [name for name in names if name not in alone]
    lacking = [f"{name} {versions[name]}" if name in versions else name for name in ordinary if name not in available]
    untrusted = [name for name in ordinary if name in available and name not in trusted]
    refused = [name for name in untrusted if allowed is not None and name not in allowed]
    if lacking and not allows_refused:
        obstacles.add(
            TargetLacksError(
                f"node {node.id} lacks extensions that the snapshot has: {', '.join(lacking)}",
                hint=[install, f"or {WITHOUT}"],
                details={"node": node.id, "extensions": lacking},
            )
        )
    if refused and not allows_refused:
        listed = ", ".join(f'"{name}"' for name in refused)
        obstacles.add(
            TargetLacksError(
                f"node {node.id}: extensions of the snapshot are not trusted: {', '.join(refused)}",
                hint=[
                    "to let a drill do everything that these extensions permit every role to do: [drill] extensions ="
                    f" [{listed}] in fleet.toml",
                    f"or {WITHOUT}",
                ],
                details={"node": node.id, "extensions": refused},
            )
        )
    if alone and not allows_refused:
        obstacles.add(
            TargetLacksError(
                f"node {node.id}: a drill can't create extensions that a server allows in only one database:"
                f" {', '.join(alone)}",
                hint=DRILL_WITHOUT,
                details={"node": node.id, "extensions": alone},
            )
        )
    for name in names:
        default, others = available.get(name, ("", set()))
        if name in versions and name in available and default != versions[name]:
            has = "also has" if versions[name] in others else "does not have"
            obstacles.warnings.append(
                f"node {node.id}: extension {name} will be created in version {default}, the server's default; the"
                f" snapshot has version {versions[name]}, which the server {has}"
            )
    return frozenset((*(name for name in names if name not in available), *refused, *alone))


def check_compression(
    node: Node, connection: psycopg.Connection[Any], facts: DatabaseFacts | None, obstacles: Obstacles
) -> None:
    """Add an obstacle if columns are compressed with lz4 but the server is built without it."""
    columns = facts.lz4_columns if facts else ()
    if not columns or connection.execute(HAS_LZ4_QUERY).fetchone() == (True,):
        return
    obstacles.add(
        TargetLacksError(
            f"node {node.id}: its PostgreSQL is built without lz4, with which columns of the snapshot are compressed:"
            f" {list_some(columns, NAMED_MAX)}",
            hint="restore to a server that is built with lz4; or run ALTER TABLE … ALTER COLUMN … SET COMPRESSION pglz"
            " on the source, take an increment, and restore it",
            details={"node": node.id, "columns": list(columns)},
        )
    )


def find_lacking_tablespaces(node: Node, needed: set[str]) -> set[str]:
    """Return those of the tablespaces (raw text) that the server lacks."""
    if not needed:
        return set()
    # Compare bytes: names are stored in the encoding of the database where they were created.
    with raising_unreachable(node), connect(node, client_encoding=RAW) as raw:
        return needed - {raw_text(bytes(name)) for (name,) in raw.execute(TABLESPACES_QUERY.encode())}


def check_tablespaces(node: Node, needed: set[str], obstacles: Obstacles) -> None:
    """Add an obstacle for the tablespaces (raw text) that the server lacks."""
    names = find_lacking_tablespaces(node, needed)
    if lacking := sorted(raw_bytes(name).decode(errors="backslashreplace") for name in names):
        obstacles.add(
            TargetLacksError(
                f"node {node.id} lacks tablespaces that the snapshot has: {', '.join(lacking)}",
                hint="create them on the target's server with CREATE TABLESPACE, then repeat the command",
                details={"node": node.id, "tablespaces": lacking},
            )
        )


def check_locales(
    node: Node,
    connection: psycopg.Connection[Any],
    source: NodeIdentity,
    facts: DatabaseFacts | None,
    obstacles: Obstacles,
) -> None:
    """Add an obstacle for locales and collations that are missing on the server or its machine."""
    collations = facts.collations if facts else ()
    lacking = [f"locale {name}" for name in sorted(_find_missing_locales(connection, _locales_of(source, collations)))]
    uses_icu = source.locale_provider == ICU or any(collation.provider == ICU for collation in collations)
    if uses_icu and not _has_icu(connection):
        lacking.append("ICU support")
    else:
        known = {name for (name,) in connection.execute(COLLATIONS_QUERY)}
        lacking += [
            f"collation {collation.name}"
            for collation in collations
            if not collation.is_own and collation.name not in known
        ]
    if lacking:
        obstacles.add(
            TargetLacksError(
                f"node {node.id} lacks locales or collations of the snapshot's databases: {', '.join(lacking)}",
                hint="install the locales on the target's machine, and import collations there (PostgreSQL manual,"
                ' "Managing Collations"), or restore to a server that has them',
                details={"node": node.id, "lacking": lacking},
            )
        )


def _locales_of(source: NodeIdentity, collations: Iterable[UsedCollation]) -> set[str]:
    """Return the locales that the machine's C library must have."""
    used = {locale for collation in collations if collation.provider == LIBC for locale in collation.locales}
    return {source.collate, source.ctype} | used


def _find_missing_locales(connection: psycopg.Connection[Any], locales: Iterable[str]) -> Iterator[str]:
    for locale in locales:
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(TRY_LOCALE, (locale,))
        except psycopg.errors.InvalidParameterValue:
            yield locale


def _has_icu(connection: psycopg.Connection[Any]) -> bool:
    query = HAS_ICU_QUERY if connection.info.server_version >= ICU_VERSION else HAS_ICU_COLLATIONS_QUERY
    return connection.execute(query).fetchone() == (True,)


# Returns no rows if the role lacks the privilege to see the data directory.
SERVER_QUERY = """
SELECT s.setting, (pg_control_system()).system_identifier, extract(epoch FROM pg_postmaster_start_time())::bigint,
       current_setting('port')
  FROM pg_settings s WHERE s.name = 'data_directory'
"""
# The maximum difference between the start time in postmaster.pid and the start time reported by the server.
START_SECONDS_MAX = 60
IDENTIFIER_BYTES = 8
START_LINE, PORT_LINE = 2, 3


class SpaceLackingError(RefusedError):
    """A target's disk has less space than the databases need."""


class DiskSpace(Struct):
    """A disk: the nodes whose data it holds, the space they need, and its free space (None if unknown).

    `is_hidden`: our role may not see the data directory.
    """

    nodes: list[str] = field(default_factory=list)
    needed_bytes: int = 0
    free_bytes: int | None = None
    is_rough: bool = False
    is_hidden: bool = False

    @property
    def is_lacking(self) -> bool:
        """Whether the free space is less than needed."""
        return self.free_bytes is not None and self.free_bytes < self.needed_bytes


class DatabaseSpace(Struct, frozen=True):
    """The space that one database needs on a node's server; `folder` is the data directory (None if unknown).

    `is_hidden`: our role may not see the data directory.
    """

    node: Node
    folder: Path | None
    needed_bytes: int
    is_rough: bool
    is_hidden: bool = False


def check_space(databases: Iterable[DatabaseSpace], obstacles: Obstacles) -> list[DiskSpace]:
    """Compare the needed and free space on each disk; add an obstacle for each disk with too little.

    A database that is set aside keeps its space. If the need is a rough estimate, add only a warning.
    """
    disks: dict[str, DiskSpace] = {}
    for database in databases:
        folder = database.folder
        disk = disks.setdefault(f"device {folder.stat().st_dev}" if folder else database.node.id, DiskSpace())
        if folder:
            status = os.statvfs(folder)
            disk.free_bytes = status.f_bavail * status.f_frsize
        disk.nodes.append(database.node.id)
        disk.needed_bytes += database.needed_bytes
        disk.is_rough |= database.is_rough
        disk.is_hidden |= database.is_hidden
    for disk in disks.values():
        if disk.is_lacking and disk.free_bytes is not None:
            needed, free = size_text(disk.needed_bytes), size_text(disk.free_bytes)
            what = f"{name_nodes(disk.nodes)}: {needed} needed on disk, {free} free"
            if disk.is_rough:
                obstacles.warnings.append(f"{what}; the need is a rough estimate")
                continue
            obstacles.add(
                SpaceLackingError(
                    what,
                    hint="free up space on that disk, or restore to servers with more space: --to FILE",
                    details={"nodes": disk.nodes, "needed": disk.needed_bytes, "free": disk.free_bytes},
                ),
                disk.nodes[0],
            )
    return list(disks.values())


def is_data_directory_hidden(connection: psycopg.Connection[Any]) -> bool:
    """Whether the session's role may not see the server's data directory."""
    return connection.execute(SERVER_QUERY).fetchone() is None


def find_data_directory(connection: psycopg.Connection[Any]) -> Path | None:
    """Return the server's data directory if it is on this machine and readable, else None."""
    row = connection.execute(SERVER_QUERY).fetchone()
    if row is None:
        return None
    folder, (identifier, start, port) = Path(row[0]), row[1:]
    try:
        with (folder / "global" / "pg_control").open("rb") as control:
            stored = int.from_bytes(control.read(IDENTIFIER_BYTES), "little")
        lines = (folder / "postmaster.pid").read_text().splitlines()
        is_own = (
            stored == identifier % (1 << 64)
            and lines[PORT_LINE].strip() == port
            and abs(int(lines[START_LINE]) - start) <= START_SECONDS_MAX
        )
    except (OSError, ValueError, IndexError):
        return None
    return folder if is_own else None
