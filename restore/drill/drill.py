"""`drill`: prove that a snapshot can be restored, without using any node in the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial

from msgspec import Struct, UnsetType, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet, check_drill
from cutline.fleet.own_process import is_gone, own_label
from cutline.fleet.progress import Progress
from cutline.restore.drill.assertions import AssertionResult, ask
from cutline.restore.drill.own_servers import own_servers
from cutline.restore.drill.servers import CONTRIB, DrillPlace, drill_servers, naming_unfit, without_servers
from cutline.restore.plan.plan import RestorePlan, plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import RestorePreview
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.records.operation_records import DRILL, FAILED
from cutline.snapshots.records.proven_chains import read_all_shards, read_renamed
from cutline.snapshots.records.tombstones import check_not_deleted
from cutline.snapshots.removal.gc import RESUMABLE_SECONDS
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.clock import utc_now
from cutline.storage.errors import IndeterminateError, UnreachableError, UsageError
from cutline.storage.store import ObjectStore

# The command's exit code by verdict, as in a check.
EXIT_CODES = {"holds": 0, "fails": 1, "inconclusive": 4}
NOT_ASKED = "not run: the server was stopped because an earlier assertion never finished"


class DrillReport(Struct, frozen=True):
    """The report on a drill's restore, and the results of the assertions; a drill without results proves nothing."""

    restored: RestoreReport
    assertions: tuple[AssertionResult, ...]
    seconds: float

    @property
    def result(self) -> str:
        """`holds`, `fails` or `inconclusive`."""
        return verdict_of(self.assertions, self.restored)


def verdict_of(assertions: Sequence[AssertionResult], restored: RestoreReport) -> str:
    """Return `holds`, `fails` or `inconclusive`; the verdict is also inconclusive if statements were refused."""
    outcomes = [assertion.holds for assertion in assertions]
    if False in outcomes:
        return "fails"
    return "inconclusive" if None in outcomes or not outcomes or restored.refused else "holds"


def run_drill(
    source: Fleet,
    request: RestoreRequest,
    spark: SparkSource,
    progress: Progress,
    announce: Callable[[RestorePlan, RestorePreview], None] | None = None,
    own: Fleet | None = None,
) -> DrillReport:
    """Restore into temporary servers, run every assertion in fleet.toml, and remove the servers.

    With `own`, restore into temporary databases on that fleet's servers, and remove the databases afterwards.
    `announce` is called with the plan and its preview before the restore. Raises DrillUnfitError if the servers are
    unfit for the snapshot, and any error of check_drill or a restore.
    """
    began = time.monotonic()
    check_drill(source)
    store = source.store.open()
    check_not_deleted(store, request.name)
    request = replace(request, is_drill=True)
    request = replace(request, create_roles=request.create_roles or own is None, drill_command=request.command)
    plan = plan_restore(source, own or without_servers(source, read_all_shards(store, request.name)), request)
    shards = plan.chain.primaries
    listed = {node.id for node in plan.target_fleet.primaries}
    if own and (lacking := [shard for shard in shards if shard not in listed]):
        raise UsageError(
            f"a drill needs a server for each shard: {own.path} has no primaries with the ids {', '.join(lacking)}",
            hint=f"it must list primaries with the ids {', '.join(shards)}; several shards may share a server",
        )
    if plan.damage is not None:
        raise plan.damage
    settle_dead_drills(store, utc_now())
    # The label tells readers of the record that the servers are gone if the process has ended.
    plan = replace(plan, intent=structs.replace(plan.intent, by=own_label(DRILL, request.name)))
    results: list[AssertionResult] = []
    extensions = CONTRIB | set(source.drill.extensions)
    naming: AbstractContextManager[None]
    if own:
        made, naming = own_servers(plan, extensions, progress), nullcontext()
    else:
        progress.step("start PostgreSQL")
        made, naming = drill_servers(source, plan, extensions, progress), naming_unfit(request.name)
    with made as place:

        def verify(restored: RestoreReport) -> int:
            results.extend(_ask_all(source, place, read_renamed(store, request.name), progress))
            return EXIT_CODES[verdict_of(results, restored)]

        with naming:
            restored = restore_fleet(
                place.plan, spark, progress, announce=announce and partial(announce, place.plan), verify=verify
            )
        progress.step("remove the databases" if own else "stop PostgreSQL")
    return DrillReport(restored, tuple(results), time.monotonic() - began)


def _ask_all(
    source: Fleet, place: DrillPlace, renamed: Mapping[str, str], progress: Progress
) -> Iterator[AssertionResult]:
    """Ask the assertions of the fleet's file, which may have other ids for the snapshot's shards (`renamed`) now."""
    progress.step("ask assertions", total=len(source.drill.assertion), unit="assertions")
    readers, ended = {target.shard: place.make_reader(target) for target in place.plan.targets}, set[str]()
    ids = {new: known for known, new in renamed.items()}
    for table in source.drill.assertion:
        shard = ids.get(table.node, table.node)
        if shard in ended:
            yield AssertionResult(table, holds=None, why=NOT_ASKED)
        elif shard in readers:
            result = ask(table, readers[shard])
            ended |= {shard} if result.has_ended_server else set()
            yield result
        else:
            yield AssertionResult(table, holds=None, why=f"the snapshot has no shard {table.node}")
        progress.advance(1)


def settle_dead_drills(store: ObjectStore, now: datetime) -> None:
    """Record the end of killed drills, which can't be resumed.

    The local clock may be wrong, and there is no node to ask. So a lease counts as expired only after a very long time,
    or if its process ran on this machine and has ended.
    """
    for lease in open_leases(store):
        process = lease.operation.process
        has_gone = not isinstance(process, UnsetType) and is_gone(process)
        if lease.operation.is_drill and (has_gone or not lease.is_running(now - timedelta(seconds=RESUMABLE_SECONDS))):
            # If the store accepts no writes, the operation stays open.
            with suppress(UnreachableError, IndeterminateError):
                record_outcome(store, lease.operation, FAILED, "the drill was killed; its servers are gone")
