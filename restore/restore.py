"""`restore`: the fleet's databases as they were at a cut, loaded beside what is there and published at the end.

Until the last step nothing exists under a real name, and whatever ends the restore before takes its databases
away again. The next restore drops what a restore that died has left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fleet.config import Fleet
from fleet.groups import Group, matches
from fleet.left_out import LeftOut
from fleet.progress import Progress
from fleet.sessions import in_parallel
from fleet.watch import watched
from restore.build import create_empty, finish, read_scripts
from restore.roles import create_roles, missing_roles
from restore.target import (
    Target,
    TargetUnfitError,
    check_target,
    check_xml,
    columns_of_xml,
    create_database,
    drop_loading,
    locked_targets,
    publish_all,
    release_slots,
    target_of,
)
from snapshots.chain import Chain
from snapshots.commits import read_chain
from snapshots.jobs import SparkSource
from snapshots.leases import leased
from snapshots.open_operations import OpenOperation, read_open_operations, told_where_missing
from snapshots.operations import Operation, new_operation
from snapshots.store_identity import check_of_fleet, read_identity
from storage.errors import SnapshotError, UsageError
from storage.open import open_store
from storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore: a snapshot at an increment (None: the newest), `groups` by pattern, and over what.

    `create_roles`: make the roles that a target lacks.
    """

    name: str
    increment: int | None = None
    groups: tuple[str, ...] = ()
    replace: bool = False
    create_roles: bool = False


@dataclass(slots=True)
class NodeReport:
    """One restored database."""

    node: str
    database: str
    rows: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RestoreReport:
    """What a restore did. `aside`: where existing databases went; `left_out`: what was not restored, by name.

    `not_in_snapshot`: what there was not to restore; `open_operations`: those of the snapshot that had no outcome.
    `slots_dropped` are those of the chains that ended with the databases put aside; `slots_left` could not be dropped.
    `roles_created` (`node: role`) stay where the restore fails.
    """

    snapshot: str
    increment: int
    operation: str
    nodes: list[NodeReport]
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    aside: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    not_in_snapshot: tuple[LeftOut, ...] = ()
    slots_dropped: list[str] = field(default_factory=list)
    slots_left: list[str] = field(default_factory=list)
    open_operations: tuple[OpenOperation, ...] = ()
    roles_created: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Restoring:
    """One restore under way.

    By shard: `missing` are the roles that targets lack, `roots` for restore/partitions.py, and `search_paths` what rows
    are loaded with.
    """

    chain: Chain
    store: ObjectStore
    location: tuple[str, dict[str, Any]]
    targets: list[Target]
    request: RestoreRequest
    operation: Operation
    report: RestoreReport
    missing: dict[str, list[str]] = field(default_factory=dict)
    roots: dict[str, dict[int, str]] = field(default_factory=dict)
    search_paths: dict[str, str] = field(default_factory=dict)

    def groups(self, shard: str) -> list[Group]:
        """The shard's groups that are restored."""
        wanted = self.request.groups
        return [g for g in self.chain.groups(shard) if not wanted or matches(g.name, wanted)]


def plan_restore(source: Fleet, target: Fleet, request: RestoreRequest) -> Restoring:
    """Read the chain and find every shard's target, contacting only the store."""
    store = open_store(source.store_url, source.store_options)
    identity = read_identity(store, source)
    open_operations = read_open_operations(store, request.name)
    with told_where_missing(open_operations):
        chain = read_chain(store, request.name, request.increment)
    check_of_fleet(chain, identity)
    chain.check_archive()
    shards = [identity.node for identity in chain.nodes if identity.backup_of is None]
    operation = new_operation("restore", request.name, chain.last.increment, tuple(shards))
    known = {node.id: node for node in target.primaries}
    missing = [shard for shard in shards if shard not in known]
    if missing:
        raise UsageError(
            f"{target.path} has no primary {', '.join(missing)}, which snapshot {request.name} has",
            hint="restore matches nodes by id: give the target's primaries the ids of the snapshot's",
        )
    backups = {shard: tuple(node for node in target.nodes if node.backup_of == shard) for shard in shards}
    targets = [target_of(shard, known[shard], backups[shard], operation.id) for shard in shards]
    report = RestoreReport(
        request.name, chain.last.increment, operation.id, [NodeReport(t.node.id, t.database) for t in targets]
    )
    report.not_in_snapshot, report.open_operations = chain.left_out, open_operations
    report.bytes = sum(sum(commit.object_sizes.values()) for commit in chain.commits)
    restoring = Restoring(
        chain, store, (source.store_url, dict(source.store_options)), targets, request, operation, report
    )
    if request.groups and not any(restoring.groups(shard) for shard in shards):
        raise UsageError(
            f"no group of snapshot {request.name} matches {', '.join(request.groups)}",
            hint=f"see: snapshot show {request.name}",
        )
    return restoring


def check_restore(restoring: Restoring, progress: Progress) -> None:
    """Make every check of a restore, changing nothing."""
    progress.step("check targets")
    with locked_targets(restoring.targets) as connections:
        _check(restoring, connections)


def _check(restoring: Restoring, connections: Mapping[str, Any]) -> None:
    part = restoring.chain.part
    seen: dict[str, str] = {}
    for target in restoring.targets:
        source = part.baseline[target.shard]
        connection = connections[target.shard]
        roles, may_create = restoring.chain.roles(target.shard), restoring.request.create_roles
        place = check_target(target, connection, source, replace=restoring.request.replace)
        states = restoring.chain.tables(target.shard)
        check_xml(target, connection, source, columns_of_xml(restoring.groups(target.shard), states))
        missing = missing_roles(target, connection, roles, source.encoding, may_create=may_create)
        restoring.missing[target.shard] = missing
        if place in seen:
            raise TargetUnfitError(
                f"nodes {seen[place]} and {target.node.id} are the same database of one server",
                hint="give every shard of the target a database of its own",
            )
        seen[place] = target.node.id


def restore_fleet(restoring: Restoring, spark: SparkSource, progress: Progress) -> RestoreReport:
    """Restore every shard, all in parallel; nothing is visible before all of it is."""
    began = time.monotonic()
    progress.step("check targets")
    with (
        watched(target.maintenance for target in restoring.targets) as watch,
        locked_targets(restoring.targets) as connections,
    ):
        _check(restoring, connections)
        with leased(restoring.store, restoring.operation, progress):
            scripts = {t.shard: read_scripts(restoring, t.shard) for t in restoring.targets}
            spark.begin()
            # Imported once the checks have passed: a refusal must not wait for Arrow.
            from restore.rows import load_rows

            try:
                progress.step("create databases")
                baseline = restoring.chain.part.baseline
                in_parallel(
                    lambda one: create_database(one, connections[one.shard], baseline[one.shard]), restoring.targets
                )
                for target in restoring.targets:
                    restoring.report.roles_created += create_roles(target, restoring.missing[target.shard])
                in_parallel(lambda one: create_empty(restoring, one, scripts[one.shard]), restoring.targets)
                load_rows(restoring, spark, progress, watch)
                progress.step("indexes and constraints")
                with ThreadPoolExecutor(max_workers=len(restoring.targets)) as threads:
                    ends = [
                        threads.submit(finish, restoring, one, scripts[one.shard], progress)
                        for one in restoring.targets
                    ]
                    for end in ends:
                        end.result()
                progress.step("publish")
                restoring.report.aside = publish_all(restoring.targets, connections)
                if restoring.report.aside:
                    released = release_slots(restoring.targets, connections)
                    restoring.report.slots_dropped, restoring.report.slots_left = released
            except BaseException:
                with suppress(SnapshotError):
                    drop_loading(restoring.targets)
                raise
    report = restoring.report
    report.rows = sum(node.rows for node in report.nodes)
    report.seconds = time.monotonic() - began
    return report
