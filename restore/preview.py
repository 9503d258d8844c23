"""Check what a restore needs, without changing anything: the targets, their roles, and the DDL that they can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from msgspec import structs

from fleet.nodes.encodings import raw_text
from fleet.nodes.privileges import read_role
from fleet.progress import Progress
from fleet.tables.groups import Group
from restore.build import read_shard_ddl
from restore.database_records import list_databases
from restore.databases import find_slots
from restore.ddl.ddl import ChangedRoles, Ddl, StoredDdl, show_name
from restore.ddl.unprivileged import AdaptedDdl, adapt_ddl
from restore.parts.scope import TableMove
from restore.plan import RestorePlan
from restore.rehearsal import check_memberships, read_our_name
from restore.request import RestoreRequest
from restore.roles import check_mapped, find_role_changes, missing_roles, name_bytes
from restore.target import Target, TargetUnfitError, check_target, check_xml, find_xml_columns, lock_targets
from restore.unfinished import check_no_unfinished
from snapshots.operations.slot_owners import read_slot_owners
from snapshots.records.chain import Chain
from snapshots.records.large_objects import count_by_node
from storage.store import ObjectStore

# NAMEDATALEN - 1.
NAME_BYTES_MAX = 63


@dataclass(frozen=True, slots=True)
class RestorePreview:
    """What a restore would do: the roles that each shard's target lacks, and what it would leave out and replace.

    `untried` are the nodes where our role is not a superuser: only the restore itself tries the DDL there, and compares
    the owners of large objects.
    """

    roles_missing: Mapping[str, list[str]]
    left_out: list[str]
    untried: list[str]
    replaces: list[str]


def preview_restore(plan: RestorePlan, progress: Progress) -> RestorePreview:
    """Make every check of a restore that changes nothing.

    Raises what check_targets and lock_targets raise.
    """
    progress.step("check targets")
    with lock_targets(plan.targets) as connections, TemporaryDirectory(prefix="cutline-ddl-") as folder:
        check_no_unfinished(plan.store.open(), plan.request.name, plan.targets, connections)
        missing = check_targets(plan.targets, plan.chain, plan.groups, plan.request, connections)
        ddl, left_out = read_all_ddl(plan.store.open(), plan, plan.targets, connections, Path(folder))
        left_out += left_rows(plan)
        untried = [target.node.id for target in plan.targets if isinstance(ddl[target.shard], AdaptedDdl)]
        return RestorePreview(missing, left_out, untried, find_replaced(plan, connections))


def check_targets(
    targets: Iterable[Target],
    chain: Chain,
    groups: Mapping[str, Iterable[Group]],
    request: RestoreRequest,
    connections: Mapping[str, psycopg.Connection[Any]],
) -> dict[str, list[str]]:
    """Raise unless every target can take its shard; return the roles that it lacks, by shard.

    `groups` and `connections` are by shard. Raises TargetUnfitError, TargetExistsError.
    """
    places: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for target in targets:
        shard, connection = target.shard, connections[target.shard]
        source = chain.baseline[shard]
        place = check_target(target, connection, source, replace=request.replace)
        check_xml(target, connection, source, find_xml_columns(groups[shard], chain.tables(shard)))
        roles = request.scope.roles_needed(chain.roles(shard))
        missing[shard] = missing_roles(target, connection, roles, source.encoding, may_create=request.create_roles)
        if place in places:
            raise TargetUnfitError(
                f"nodes {places[place]} and {target.node.id} are the same database of one server",
                hint="give every shard of the target a database of its own",
            )
        places[place] = target.node.id
    return missing


def read_all_ddl(
    store: ObjectStore,
    plan: RestorePlan,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    folder: Path,
) -> tuple[dict[str, Ddl], list[str]]:
    """Read the DDL of the targets' shards, as the role of its target can run it; return what is left out for that, too.

    Raises TargetUnfitError if a role may not act as an owner that the DDL names.
    """
    found: dict[str, Ddl] = {}
    left_out: list[str] = []
    met: set[str] = set()
    for number, target in enumerate(targets):
        shard, connection = target.shard, connections[target.shard]
        stored = read_shard_ddl(store, plan.chain, shard, folder / f"archive-{number}")
        if plan.request.scope.changes_roles:
            stored, changed = _change_roles(plan, target, connection, stored)
            left_out += [f"{what} on {shard}: {reason}" for what, reason in changed.left_out.items()]
            met |= changed.met
        if moves := plan.moves(shard):
            stored.check_moves(_raw_moves(moves, connection, plan.chain.baseline[shard].encoding))
        ddl, lines = _choose_ddl(plan.request, stored)
        left_out += [f"{line} on {shard}" for line in lines]
        found[shard] = ddl
        if not read_role(target.node, connection).is_super:
            ddl, grants = ddl.without_system_grants()
            left_out += [f"{name} on {shard}: a superuser grants them" for name in grants]
            scripts = ddl.write_scripts(target.maintenance)
            ours = adapt_ddl(scripts, ddl.search_path, read_our_name(target))
            check_memberships(target, connection, ours.roles)
            left_out += [f"publication {name} on {shard}: made by: snapshot init" for name in ours.omitted]
            found[shard] = ours
    if len(found) == len(plan.targets):
        check_mapped(plan, met)
    return found, left_out


def _choose_ddl(request: RestoreRequest, ddl: StoredDdl) -> tuple[StoredDdl, list[str]]:
    """The DDL without what would be wrong, or not wanted, without all rows; and what is left out."""
    if request.is_partial:
        return ddl.without_dependents()
    return ddl.without_view_rows() if request.scope.schema_only else (ddl, [])


def _raw_moves(moves: Sequence[TableMove], connection: psycopg.Connection[Any], encoding: str) -> list[TableMove]:
    """The moves with all names as raw text; raise TargetUnfitError if a database can't have one."""
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
    plan: RestorePlan, target: Target, connection: psycopg.Connection[Any], ddl: StoredDdl
) -> tuple[StoredDdl, ChangedRoles]:
    """The DDL with other roles; and what is left out of it and of large objects, and the roles that it had named."""
    shard, chain = target.shard, plan.chain
    changes = find_role_changes(target, connection, plan)
    changed, found = ddl.with_roles(changes)
    roles = chain.roles(shard)
    names = map(raw_text, name_bytes(connection, roles, chain.baseline[shard].encoding))
    lacking = [role for role, name in zip(roles, names, strict=True) if changes.lacks(name)]
    left_out = dict(found.left_out)
    if lacking and plan.request.is_with_all_rows and count_by_node(chain.full).get(shard):
        left_out[f"any privileges on large objects of role {', '.join(lacking)}"] = "the target has no such role"
    return changed, ChangedRoles(left_out, frozenset(map(show_name, found.met)))


def left_rows(plan: RestorePlan) -> list[str]:
    """What a restore of the DDL alone leaves out of rows and sequences, and one of some tables of large objects."""
    if plan.request.is_with_all_rows:
        return []
    counts = count_by_node(plan.chain.full)
    rows = ["all rows, and the values of all sequences"] if plan.request.scope.schema_only else []
    return rows + [f"{counts[one.shard]} large objects on {one.shard}" for one in plan.targets if counts.get(one.shard)]


def find_replaced(plan: RestorePlan, connections: Mapping[str, psycopg.Connection[Any]]) -> list[str]:
    """What `--replace` ends, a line each: the databases that it puts aside, and the chains that go on in them."""
    lines: list[str] = []
    chains: set[str] = set()
    owners = read_slot_owners(plan.store.open())
    for target in plan.targets:
        connection = connections[target.shard]
        if target.database not in list_databases(connection):
            continue
        lines.append(f"{target.node.id}: database {target.database} is put aside as {target.aside}")
        for slot in find_slots(connection, target.database):
            owner = owners.owner_of(slot)
            chains.add(f"chain {owner.snapshot}" if owner else f"the chain of slot {slot}")
    return lines + [f"{chain} ends: it gets no more increments" for chain in sorted(chains)]
