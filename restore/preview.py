"""Check what a restore needs, without changing anything: the targets, their roles, and the DDL that they can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

from fleet.nodes.privileges import read_role
from fleet.progress import Progress
from restore.build import read_shard_ddl
from restore.database_records import list_databases
from restore.databases import find_slots
from restore.ddl.ddl import Ddl
from restore.ddl.unprivileged import AdaptedDdl, adapt_ddl
from restore.plan import RestorePlan
from restore.rehearsal import check_memberships, read_our_name
from restore.roles import missing_roles
from restore.target import Target, TargetUnfitError, check_target, check_xml, find_xml_columns, lock_targets
from restore.topology.foreign_keys import keeps_foreign_key
from restore.unfinished import check_no_unfinished
from snapshots.operations.slot_owners import read_slot_owners
from snapshots.records.chain import Chain
from snapshots.records.large_objects import count_by_node
from storage.store import ObjectStore


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
        missing = check_targets(plan, plan.targets, connections)
        ddl, left_out = read_all_ddl(plan.store.open(), plan, plan.targets, connections, Path(folder))
        if plan.request.groups:
            left_out += left_large_objects(plan.chain)
        untried = [target.node.id for target in plan.targets if isinstance(ddl[target.shard], AdaptedDdl)]
        return RestorePreview(missing, left_out, untried, find_replaced(plan, connections))


def check_targets(
    plan: RestorePlan, targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> dict[str, list[str]]:
    """Raise unless every one of the `targets` can take its shard; return the roles that it lacks, by shard.

    Raises TargetUnfitError, TargetExistsError.
    """
    chain, request, groups = plan.chain, plan.request, plan.groups
    places: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for target in targets:
        shard, connection = target.shard, connections[target.shard]
        newest = max(target.sources or (shard,), key=lambda one: chain.baseline[one].server_version)
        source = chain.baseline[newest]
        place = check_target(target, connection, source, replace=request.replace)
        check_xml(target, connection, source, find_xml_columns(groups[shard], chain.tables(target.source)))
        roles = plan.roles(target)
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
    for number, target in enumerate(targets):
        shard, connection = target.shard, connections[target.shard]
        ddl = read_shard_ddl(store, plan.chain, target.source, folder / f"archive-{number}")
        if plan.request.groups:
            ddl, dependents = ddl.without_dependents()
            left_out += [f"{name} on {shard}" for name in dependents]
        elif plan.topology:
            ddl, keys = ddl.without_foreign_keys(partial(keeps_foreign_key, plan.topology))
            left_out += [f"{name} on {shard}: rows that it joins may be on different targets" for name in keys]
        found[shard] = ddl
        if not read_role(target.node, connection).is_super:
            ddl, grants = ddl.without_system_grants()
            left_out += [f"{name} on {shard}: a superuser grants them" for name in grants]
            scripts = ddl.write_scripts(target.maintenance)
            ours = adapt_ddl(scripts, ddl.search_path, read_our_name(target))
            check_memberships(target, connection, ours.roles)
            left_out += [f"publication {name} on {shard}: made by: snapshot init" for name in ours.omitted]
            found[shard] = ours
    return found, left_out


def left_large_objects(chain: Chain) -> list[str]:
    """The large objects that a restore of some tables leaves out, a line for each shard."""
    return [f"{count} large objects on {shard}" for shard, count in count_by_node(chain.full).items()]


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
