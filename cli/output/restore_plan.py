"""The plan of a restore, for people and as JSON: source, cut, age, what goes where, time and disk space."""

from __future__ import annotations

from typing import Any

from cutline.cli.output.format import age_text, count_text, quantity_text, seconds_text, size_text, time_text
from cutline.restore.estimates.volumes import BegunShard
from cutline.restore.obstacles.disk_space import DiskSpace
from cutline.restore.plan import RestorePlan
from cutline.restore.preview import RestorePreview
from cutline.restore.targets.database_records import Phase
from cutline.snapshots.records.cut_times import cut_time
from cutline.storage.clock import utc_now


def plan_lines(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    """The first lines of a restore."""
    chain, volumes, now = plan.chain, preview.volumes, utc_now()
    made_at = cut_time(chain.last)
    number = f"increment {chain.last.increment}" if chain.last.increment else "the full snapshot"
    lines = [
        f"source: {chain.name} at {number}, from {plan.store.open().url}",
        f"cut: {time_text(made_at)}, {age_text(made_at, now=now)}",
    ]
    if plan.request.at and plan.request.at > utc_now():
        lines.append("warning: --at is in the future, so the newest cut is taken; see its offset from UTC")
    if plan.next_cut:
        after = chain.last.increment + 1
        lines.append(f"not taken, because it is after --at: the cut of increment {after}, {time_text(plan.next_cut)}")
    where = "into the tables of" if plan.request.scope.data_only else "to"
    for target in plan.targets:
        begun = preview.begun.get(target.shard)
        if (volume := volumes.get(target.shard)) is None:
            if begun:
                lacks = "the values of its sequences" if plan.request.scope.data_only else "its name"
                done = "published already" if begun.phase == Phase.PUBLISHED else f"done already but for {lacks}"
                rows = quantity_text(begun.rows, "rows")
                lines.append(f"{target.shard} to database {target.database}: {rows}, {done}")
            continue
        about = _about(is_rough=volume.changes_are_rough and not volume.rows_are_rough)
        changes = f" and {about}{quantity_text(volume.changes, 'changes')}" if volume.changes else ""
        lines.append(
            f"{target.shard} {where} database {target.database} on {preview.servers[target.shard]}:"
            f" {_about(is_rough=volume.rows_are_rough)}{quantity_text(volume.row_count, 'rows')}{changes},"
            f" {size_text(volume.stored_bytes)} stored,"
            f" {_about(is_rough=volume.is_rough)}{size_text(volume.size_bytes)} on disk{_loaded_text(begun)}"
        )
    lines += ["then: the planner's statistics of every table (ANALYZE)"] * plan.request.scope.analyze
    return [*lines, _time_line(preview), *map(_disk_line, preview.disks)]


def _loaded_text(begun: BegunShard | None) -> str:
    if begun is None or not (begun.rows or begun.is_loaded):
        return ""
    return f"; {'all ' if begun.is_loaded else ''}{count_text(begun.rows)} rows are loaded already"


def _time_line(preview: RestorePreview) -> str:
    estimate = preview.estimate
    unmeasured = " (no restore of all rows from this store has been measured yet)"
    based = f", by what {estimate.basis} took" if estimate.basis else unmeasured
    return f"time: {'roughly' if estimate.is_rough else 'about'} {seconds_text(estimate.total)}{based}"


def _disk_line(disk: DiskSpace) -> str:
    why = (
        "the role may not see the server's data_directory"
        if disk.is_hidden
        else "the server does not run on this machine, or its data can't be read here"
    )
    free = f"free space not known: {why}" if disk.free_bytes is None else f"{size_text(disk.free_bytes)} free"
    needed = f"{_about(is_rough=disk.is_rough)}{size_text(disk.needed_bytes)} needed"
    return f"disk of {', '.join(disk.nodes)}: {needed}, {free}"


def _about(*, is_rough: bool) -> str:
    return "roughly " if is_rough else ""


def plan_document(plan: RestorePlan, preview: RestorePreview) -> dict[str, Any]:
    """The same as JSON."""
    made_at = cut_time(plan.chain.last)
    estimate = preview.estimate
    return {
        "store": plan.store.open().url,
        "cut_at": time_text(made_at),
        "next_cut_at": time_text(plan.next_cut) if plan.next_cut else None,
        "age_seconds": round((utc_now() - made_at).total_seconds(), 3),
        "targets": [
            {
                "shard": target.shard,
                "sources": target.sources or (target.shard,),
                "node": target.node.id,
                "database": target.database,
                "server": preview.servers[target.shard],
                "rows": volume.row_count,
                "rows_are_rough": volume.rows_are_rough,
                "changes": volume.changes,
                "changes_are_rough": volume.changes_are_rough,
                "bytes": volume.stored_bytes,
                "size_bytes": volume.size_bytes,
                "size_is_rough": volume.is_rough,
                **_begun_document(preview.begun.get(target.shard)),
            }
            for target in plan.targets
            if (volume := preview.volumes.get(target.shard)) is not None
        ],
        "done": [
            {"shard": target.shard, "node": target.node.id, "database": target.database, **_begun_document(begun)}
            for target in plan.targets
            if (begun := preview.begun.get(target.shard)) is not None and target.shard not in preview.volumes
        ],
        "seconds": round(estimate.total, 3),
        "seconds_by_step": {step: round(seconds, 3) for step, seconds in estimate.seconds.items()},
        "seconds_are_rough": estimate.is_rough,
        "based_on": estimate.basis or None,
        "disks": [
            {
                "nodes": disk.nodes,
                "needed_bytes": disk.needed_bytes,
                "free_bytes": disk.free_bytes,
                "is_rough": disk.is_rough,
            }
            for disk in preview.disks
        ],
    }


def _begun_document(begun: BegunShard | None) -> dict[str, Any]:
    return {"phase": begun.phase if begun else None, "rows_loaded": begun.rows if begun else 0}
