"""Read the DDL of a restore in a form that the targets' roles can run, and list the omissions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import psycopg
from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.messages import DRILL_COMMAND, SAME_TARGET
from cutline.fleet.table_names import table_name
from cutline.nodes.encodings import raw_text
from cutline.nodes.problems import read_role
from cutline.restore.ddl.ddl import Ddl, Refusal, show_name
from cutline.restore.ddl.entries import ROWS_OF_VIEW, ArchiveDdl, lost_rows, read_archive, with_extension_rows
from cutline.restore.ddl.role_statements import ChangedRoles
from cutline.restore.ddl.statements import LOGGED_PARENTS_VERSION, without_unlogged_parent
from cutline.restore.ddl.unprivileged import adapt_ddl, take_superusers_part, with_beforehand
from cutline.restore.plan.copies import explain_damage
from cutline.restore.plan.database_plan import PlannedDatabase, check_grantors, find_path
from cutline.restore.plan.plan import LockedTargets, RestorePlan
from cutline.restore.plan.report import COUNT
from cutline.restore.plan.roles import (
    check_mapped,
    check_memberships,
    find_role_changes,
    name_bytes,
    read_our_name,
)
from cutline.restore.plan.topology import keeps_foreign_key
from cutline.restore.scope.scope import TableMove
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.requirements import (
    INSTALL,
    WITHOUT,
    check_compression,
    check_extensions,
    check_tablespaces,
)
from cutline.restore.targets.target import Target, TargetUnfitError
from cutline.snapshots.ddl.contradictions import DdlContradictedError, contradictions
from cutline.snapshots.ddl.ddl_archive import EXTENSION, TABLE, ArchiveEntry, DdlArchive
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.ddl.extension_tables import ExtensionsOfShard, read_extension_rows
from cutline.snapshots.records.commit import count_by_node
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError

# NAMEDATALEN - 1.
NAME_BYTES_MAX = 63


class CheckedDdl(Struct, frozen=True):
    """The DDL of some shards as it will be run, their archives' entries, and the omissions.

    `counted` maps lines of `left_out` that may be numerous to the text that replaces them, with COUNT for their number.
    """

    ddl: dict[str, Ddl] = field(default_factory=dict)
    entries: dict[str, Sequence[ArchiveEntry]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    counted: dict[str, str] = field(default_factory=dict)


def count_views(lines: Iterable[str], where: str) -> dict[str, str]:
    """Return the text that replaces those of the lines that name rows of materialized views, as in `counted`."""
    return dict.fromkeys(
        (line for line in lines if line.startswith(f"{ROWS_OF_VIEW} ")), f"rows of {COUNT} materialized views {where}"
    )


class _RowsOfExtensions(Struct, frozen=True):
    """The extension rows that a target gets, lines about omitted rows, and rows lost from the store."""

    found: ExtensionsOfShard = field(default_factory=ExtensionsOfShard)
    left_out: tuple[str, ...] = ()
    lost: tuple[Refusal, ...] = ()


def read_all_ddl(
    locked: LockedTargets, targets: Iterable[Target], databases: Mapping[str, PlannedDatabase]
) -> CheckedDdl:
    """Read each shard's DDL in a form that its target's role can run; `databases` is keyed by shard.

    Adds an obstacle if the DDL contradicts the commit, if a server lacks something the DDL requires, or if our role may
    not act as an owner in the DDL.
    """
    checked, met, met_sources = CheckedDdl(), set[str](), set[str]()
    plan, obstacles, folder = locked.plan, locked.obstacles, locked.folder
    for target in targets:
        shard, connection = target.shard, locked.connections[target.shard]
        try:
            archive = read_stored_ddl(plan.store.open(), plan.chain, target.source)
            for contradicted in _find_contradictions(plan, target, met_sources, {target.source: archive}):
                obstacles.add(contradicted)
            stored = read_archive(archive)
        except ObjectDamagedError as error:
            obstacles.add(explain_damage(plan.store.open(), plan.chain, plan.wanted, error))
            continue
        facts = plan.chain.database_facts(target.source)
        superusers = plan.superusers
        rules = (superusers.extensions, superusers.install or INSTALL) if superusers else ()
        allows = plan.request.allow_refused_ddl
        without = check_extensions(
            target.node, connection, stored.entries, facts, obstacles, *rules, allows_refused=allows
        )
        check_compression(target.node, connection, facts, obstacles)
        planned = databases.get(shard) or PlannedDatabase()
        checked.left_out.extend(planned.left_out)
        _check_tablespaces(locked, target, stored.entries, planned)
        with obstacles.collecting(target.node.id):
            if plan.request.scope.changes_roles:
                stored, changed = _change_roles(plan, target, connection, stored)
                checked.left_out.extend(f"{what} on {shard}: {reason}" for what, reason in changed.left_out.items())
                met |= changed.met
            if moves := plan.moves(target):
                stored.check_moves(_raw_moves(moves, connection, plan.chain.baseline[target.source].encoding))
        chosen, lines = _choose_ddl(plan, stored)
        is_divided = plan.topology is not None and not plan.request.tables.is_partial
        why = ": rows that it joins may be on different targets" if is_divided else ""
        left = [f"{line} on {shard}{why}" for line in lines]
        checked.left_out.extend(left)
        checked.counted.update(count_views(left, f"on {shard}{why}"))
        checked.entries[shard] = chosen.entries
        rows = _find_extension_rows(plan, target, stored.entries, obstacles)
        checked.left_out.extend(rows.left_out)
        with_rows = partial(with_extension_rows, found=rows.found, sequences=plan.sequences(target))
        if read_role(target.node, connection).is_super:
            written = with_rows(chosen.for_target(target.node, folder))
            written = _for_version(written, connection.info.server_version)
            checked.ddl[shard] = _with_database(plan, target, written, planned, rows.lost)
            continue
        chosen, grants = chosen.without_system_grants()
        checked.left_out.extend(f"{name} on {shard}: only a superuser can grant them" for name in grants)
        if superusers:
            chosen, done = take_superusers_part(chosen, superusers.role, without if allows else None)
            checked.left_out.extend(f"{name} on {shard}: {why}" for name, why in done.left_out.items())
            for schema, names in done.privileges.items():
                where = f"{f' in schema {schema}' * bool(schema)} on {shard}"
                lines = [f"privileges of {name}{where}: it belongs to an extension" for name in names]
                checked.left_out.extend(lines)
                checked.counted.update(dict.fromkeys(lines, f"privileges of {COUNT} objects of extensions{where}"))
            written = with_beforehand(chosen.for_target(target.node, folder), done)
        else:
            written = chosen.for_target(target.node, folder)
        adapted = with_rows(adapt_ddl(_for_version(written, connection.info.server_version), read_our_name(target)))
        checked.ddl[shard] = ours = _with_database(plan, target, adapted, planned, rows.lost)
        with obstacles.collecting(target.node.id):
            check_memberships(target, connection, ours.roles)
        with obstacles.collecting(target.node.id):
            check_grantors(plan, target, connection, planned.ddl)
        if not plan.request.is_drill:
            checked.left_out.extend(
                f"publication {name} on {shard}: created by: snapshot init" for name in ours.omitted
            )
    if len(checked.ddl) == len(plan.targets):
        with obstacles.collecting():
            check_mapped(plan, met)
    return checked


def _check_tablespaces(
    locked: LockedTargets, target: Target, entries: Iterable[ArchiveEntry], planned: PlannedDatabase
) -> None:
    """Prepare the tablespaces of the objects and the database for a drill; add an obstacle if the server lacks any."""
    plan, connection = locked.plan, locked.connections[target.shard]
    needed = {entry.tablespace for entry in entries if entry.tablespace}
    if planned.ddl and planned.ddl.properties.tablespace:
        encoding = plan.chain.baseline[target.source].encoding
        needed |= set(map(raw_text, name_bytes(connection, [planned.ddl.properties.tablespace], encoding)))
    if plan.superusers:
        plan.superusers.prepare_tablespaces(target, needed)
    check_tablespaces(target.maintenance, needed, locked.obstacles)


def _find_contradictions(
    plan: RestorePlan, target: Target, met: set[str], read: Mapping[str, DdlArchive] = MappingProxyType({})
) -> Iterator[DdlContradictedError]:
    """Yield an error for each of the target's sources whose DDL contradicts the commit; add the sources to `met`.

    Sources in `met` are not compared again. `read` is DDL that was read before, by source. Raises ObjectDamagedError.
    """
    for source in target.sources or (target.source,):
        if source in met:
            continue
        met.add(source)
        ddl, groups = read.get(source) or read_stored_ddl(plan.store.open(), plan.chain, source), None
        if plan.request.tables.is_partial:
            groups = plan.request.tables.of(plan.chain.groups(source))
        if details := contradictions(plan.chain, source, ddl, groups):
            yield DdlContradictedError(source, details)


def warn_of_contradictions(locked: LockedTargets, targets: Iterable[Target]) -> None:
    """Add a warning for each source whose DDL contradicts the commit. A restore of only the rows does not read the DDL.

    So it is the way to get rows back whose definitions somebody has changed.
    """
    met = set[str]()
    for target in targets:
        with suppress(ObjectDamagedError):
            locked.obstacles.warnings += [error.message for error in _find_contradictions(locked.plan, target, met)]


def _find_extension_rows(
    plan: RestorePlan, target: Target, entries: Iterable[ArchiveEntry], obstacles: Obstacles
) -> _RowsOfExtensions:
    """Read the extension rows that a target gets; add an obstacle if they are damaged."""
    if plan.request.tables.is_partial:
        return _RowsOfExtensions()
    store, commit, where = plan.store.open(), plan.chain.last, f"rows of extension tables on {target.shard}"
    try:
        stored = read_extension_rows(store, commit, target.source)
    except ObjectDamagedError as error:
        if plan.request.allow_refused_ddl:
            return _RowsOfExtensions(lost=(lost_rows(error.message),))
        error.hint = "\n".join([*_earlier_rows(store, plan, target.source), f"{WITHOUT}; or", str(error.hint)])
        obstacles.add(error)
        return _RowsOfExtensions()
    # The rows were read after the cut, so they may include rows of an extension that is not in the DDL at the cut.
    extensions = {show_name(entry.name) for entry in entries if entry.kind == EXTENSION}
    lines = [
        f"{where}: {table_name(table.table.schema, table.table.name)} belongs to an extension created after the cut"
        for table in stored.tables
        if table.table.extension not in extensions
    ]
    others = [source for source in target.sources if source != target.source]
    own = stored.digests() if others else {}
    for source in others:
        try:
            is_same = read_extension_rows(store, commit, source).digests() == own
        except ObjectDamagedError as error:
            lines.append(f"{where}: could not be compared with those of {source}: {error.message}")
        else:
            differ = f"{where}: taken from {target.source}; those of {source} differ and are left out"
            lines += [] if is_same else [differ]
    return _RowsOfExtensions(stored.of(extensions), tuple(lines))


def _earlier_rows(store: ObjectStore, plan: RestorePlan, shard: str) -> Iterator[str]:
    """Yield hints naming the newest earlier increment with undamaged rows; every commit stores all extension rows."""
    for commit in reversed(plan.chain.commits[:-1]):
        with suppress(ObjectDamagedError):
            read_extension_rows(store, commit, shard)
            command = plan.wanted.command
            yield f"the newest earlier increment with undamaged rows: {command} --increment {commit.increment}"
            if not command.startswith(DRILL_COMMAND):
                yield SAME_TARGET
            return


def _for_version(ddl: Ddl, version: int) -> Ddl:
    """Change the statements that an older pg_dump writes and that a server of this version refuses."""
    if version < LOGGED_PARENTS_VERSION:
        return ddl
    entries = (
        replace(entry, statements=without_unlogged_parent(entry.statements)) if entry.kind == TABLE else entry
        for entry in ddl.pre_data
    )
    return replace(ddl, pre_data=tuple(entries))


def _with_database(
    plan: RestorePlan, target: Target, ddl: Ddl, planned: PlannedDatabase, lost: tuple[Refusal, ...]
) -> Ddl:
    """Add the statements for the database's own properties, and the extension rows that are lost from the store."""
    properties = plan.chain.database_properties(target.source)
    # The archive's search_path dates from the last DDL change, so the database's properties take precedence.
    path = ddl.search_path if properties is None else find_path(properties)
    settings = plan.chain.session_settings(target.source)
    return replace(ddl, database=planned.ddl, search_path=path, session_settings=settings, lost=lost)


def _choose_ddl(plan: RestorePlan, ddl: ArchiveDdl) -> tuple[ArchiveDdl, list[str]]:
    """Omit the DDL that would be wrong or unwanted when not all rows are restored; also return the omissions."""
    if plan.request.tables.is_partial:
        return ddl.without_dependents()
    if plan.topology:
        return ddl.without_foreign_keys(partial(keeps_foreign_key, plan.topology))
    return ddl.without_view_rows() if plan.request.scope.schema_only else (ddl, [])


def _raw_moves(moves: Sequence[TableMove], connection: psycopg.Connection[Any], encoding: str) -> list[TableMove]:
    """Convert the moves' names to raw text; raise TargetUnfitError if a database can't store one."""
    names = [one for move in moves for one in structs.astuple(move)]
    stored = name_bytes(connection, names, encoding)
    for name, body in zip(names, stored, strict=True):
        if len(body) > NAME_BYTES_MAX:
            raise TargetUnfitError(
                f"--group: PostgreSQL would shorten the name {name} to {NAME_BYTES_MAX} bytes",
                hint="choose a shorter name",
            )
    raw = [raw_text(body) for body in stored]
    return [TableMove(*raw[start : start + 4]) for start in range(0, len(raw), 4)]


def _change_roles(
    plan: RestorePlan, target: Target, connection: psycopg.Connection[Any], ddl: ArchiveDdl
) -> tuple[ArchiveDdl, ChangedRoles]:
    """Replace roles in the DDL; also return the roles that it named, and omissions from it and from large objects."""
    shard, chain = target.source, plan.chain
    changes = find_role_changes(target, connection, plan)
    changed, found = ddl.with_roles(changes)
    roles = plan.roles(target)
    names = map(raw_text, name_bytes(connection, roles, chain.baseline[shard].encoding))
    lacking = [role for role, name in zip(roles, names, strict=True) if changes.lacks(name)]
    left_out = dict(found.left_out)
    if lacking and plan.request.is_with_all_rows and count_by_node(chain.full).get(shard):
        left_out[f"any privileges of role {', '.join(lacking)} on large objects"] = "the target has no such role"
    return changed, ChangedRoles(left_out, frozenset(map(show_name, found.met)))
