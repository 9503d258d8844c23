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
from fleet.connections import connect
from fleet.groups import Group, matches, qualified
from fleet.left_out import LeftOut
from fleet.progress import Progress
from fleet.sessions import in_parallel
from fleet.watch import watched
from restore.ddl import run_section, set_sequences, without_foreign_keys
from restore.ledger import LEDGER, LEDGER_SCHEMA, LoadError, create_ledger
from restore.target import (
    Target,
    TargetUnfitError,
    check_target,
    create_database,
    drop_loading,
    locked_targets,
    publish_all,
    release_slots,
    target_of,
)
from snapshots.commits import read_chain
from snapshots.damage import ObjectDamagedError
from snapshots.jobs import SparkSource
from snapshots.manifest import Chain
from snapshots.operations import Operation, new_operation, recorded
from snapshots.schema import read_schema
from snapshots.store_identity import read_identity
from storage.digest import digest
from storage.errors import SnapshotError, UsageError
from storage.open import open_store
from storage.store import ObjectMissingError, ObjectStore


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore: a snapshot at an increment (None: the newest), `groups` by pattern, and over what."""

    name: str
    increment: int | None = None
    groups: tuple[str, ...] = ()
    replace: bool = False


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

    `not_in_snapshot`: what there was not to restore.
    `slots_dropped` are those of the chains that ended with the databases put aside; `slots_left` could not be dropped.
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


@dataclass(slots=True)
class Restoring:
    """One restore under way."""

    chain: Chain
    store: ObjectStore
    location: tuple[str, dict[str, Any]]
    targets: list[Target]
    request: RestoreRequest
    operation: Operation
    report: RestoreReport

    def groups(self, shard: str) -> list[Group]:
        """The shard's groups that are restored."""
        wanted = self.request.groups
        return [g for g in self.chain.groups(shard) if not wanted or matches(g.name, wanted)]


def plan_restore(source: Fleet, target: Fleet, request: RestoreRequest) -> Restoring:
    """Read the chain and find every shard's target, contacting only the store."""
    store = open_store(source.store_url, source.store_options)
    read_identity(store, source)
    chain = read_chain(store, request.name, request.increment)
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
    report.not_in_snapshot = chain.left_out
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
        place = check_target(
            target,
            connections[target.shard],
            source,
            part.roles[target.shard],
            replace=restoring.request.replace,
        )
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
        scripts = {t.shard: _scripts(restoring, t.shard) for t in restoring.targets}
        spark.begin()
        # Imported once the checks have passed: a refusal must not wait for Arrow.
        from restore.rows import load_rows

        with recorded(restoring.store, restoring.operation):
            try:
                progress.step("create databases")
                in_parallel(lambda target: _create(restoring, target, connections, scripts), restoring.targets)
                load_rows(restoring, spark, progress, watch)
                progress.step("indexes and constraints")
                with ThreadPoolExecutor(max_workers=len(restoring.targets)) as threads:
                    list(threads.map(lambda target: _finish(restoring, target, scripts), restoring.targets))
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


def _scripts(restoring: Restoring, shard: str) -> dict[str, str]:
    """A shard's DDL by section."""
    found: dict[str, str] = {}
    for stored in restoring.chain.part.objects:
        if stored.node != shard or stored.kind == "base":
            continue
        try:
            body = restoring.store.read(stored.key)
        except ObjectMissingError:
            body = b""
        if digest(body) != stored.digest:
            kind = "digest" if body else "missing"
            raise ObjectDamagedError(key=stored.key, kind=kind, node=shard, detail="its DDL is not as committed")
        found[stored.kind] = read_schema(body)
    if restoring.request.groups:
        found["post-data"], left_out = without_foreign_keys(found["post-data"])
        restoring.report.left_out += [f"foreign key {name} on {shard}" for name in left_out]
    return found


def _create(
    restoring: Restoring,
    target: Target,
    connections: Mapping[str, Any],
    scripts: Mapping[str, dict[str, str]],
) -> None:
    create_database(target, connections[target.shard], restoring.chain.part.baseline[target.shard])
    run_section(target.loaded, "pre-data", scripts[target.shard]["pre-data"])
    with connect(target.loaded) as connection:
        create_ledger(connection)


def _finish(restoring: Restoring, target: Target, scripts: Mapping[str, dict[str, str]]) -> None:
    """Indexes, keys and triggers, sequences; then the rows are counted against the ledger."""
    began = time.monotonic()
    run_section(target.loaded, "post-data", scripts[target.shard]["post-data"])
    with connect(target.loaded) as connection:
        set_sequences(connection, restoring.chain.sequences(target.shard))
        loaded = dict(
            connection.execute(f"SELECT groupno, sum(rows)::bigint FROM {LEDGER} GROUP BY groupno").fetchall()
        )
        rows = 0
        for group in restoring.groups(target.shard):
            rows += _counted(target, connection, group, loaded.get(group.number, 0))
        connection.execute(f"DROP SCHEMA {LEDGER_SCHEMA} CASCADE")
    report = next(node for node in restoring.report.nodes if node.node == target.node.id)
    report.rows = rows
    report.seconds += time.monotonic() - began


def _counted(target: Target, connection: Any, group: Group, expected: int) -> int:
    (count,) = connection.execute(f"SELECT count(*) FROM ONLY {qualified(group)}").fetchone()
    if count != expected:
        raise LoadError(
            f"node {target.node.id}: {group.name} has {count} rows, and {expected} were loaded",
            details={"node": target.node.id, "group": group.name},
        )
    return int(count)
