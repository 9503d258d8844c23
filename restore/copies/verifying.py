"""Verify the bytes of a chain's objects as a Spark job, before a restore decides from which copies it takes rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from cutline.fleet.progress import Progress
from cutline.restore.copies.choice import (
    ChainObject,
    CopyChoice,
    CopyNeeds,
    Damage,
    Wanted,
    choose_copies,
    find_listed_damage,
    list_entries,
    needs_other,
    settle_copies,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.tasks.spark_jobs import Dealing, raise_first, run_many
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """An object to read and compare with its commit."""

    one: ChainObject
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What is wrong with the object, or the error that ended the task."""

    damage: Damage | None = None
    problem: ErrorReport | None = None


def verify_copies(
    session: SparkSession, chain: Chain, wanted: Wanted, store: StoreLocation, progress: Progress
) -> CopyChoice:
    """Read what the restore needs, of the standbys only where a primary's copy is damaged, and choose the copies.

    Raises ObjectDamagedError if something is in no copy.
    """
    opened = store.open()
    damages = find_listed_damage(opened, chain)

    def verify(copies: str, nodes: Sequence[str]) -> dict[str, Damage]:
        # Counted first, by the commits: there may be more than the driver can hold.
        total = sum(one.count for one in needed_entries(chain, nodes, wanted))
        if not total:
            return {}
        progress.step(f"verify copies of {copies}", total=total, unit="objects")
        objects = (one for one in needed_objects(chain, nodes, wanted) if one.key not in damages)
        return _verify(session, (VerifyTask(one, store) for one in objects), progress, total)

    damages |= verify("primaries", wanted.nodes or chain.full.primaries)
    choice, _ = choose_copies(chain, wanted, damages)
    damaged = {chain.shard_of(one.node) for one in choice.damaged}
    damages |= verify("standbys", [one.node for one in chain.nodes if one.backup_of in damaged])
    return settle_copies(opened, chain, wanted, damages)


def needed_entries(chain: Chain, nodes: Iterable[str], wanted: Wanted) -> Iterator[ChainObject]:
    """The entries of commits that the wanted groups need in these nodes' copies; also DDL and large objects of shards.

    An object list is one if any of its objects may be needed.
    """
    return _needed(chain, list_entries(chain, nodes), wanted)


def needed_objects(chain: Chain, nodes: Iterable[str], wanted: Wanted) -> Iterator[ChainObject]:
    """The objects among `needed_entries`, and those of its lists that are needed."""
    objects = (one for entry in needed_entries(chain, nodes, wanted) for one in entry.expand())
    return _needed(chain, objects, wanted)


def _needed(chain: Chain, listed: Iterable[ChainObject], wanted: Wanted) -> Iterator[ChainObject]:
    for node, of_node in groupby(listed, lambda one: one.node):
        copy, numbers = CopyNeeds.of(chain, node), wanted.numbers(chain, chain.shard_of(node))
        for one in of_node:
            if copy.groups_of(one) & numbers or wanted.takes(needs_other(chain, node, one)):
                yield one


def _verify(session: SparkSession, tasks: Iterable[VerifyTask], progress: Progress, total: int) -> dict[str, Damage]:
    found, left, dealing = dict[str, Damage](), total, Dealing[VerifyTask](lambda task: task.one.stored.size)
    for reports in run_many(session, verify_object, tasks, progress, dealing):
        raise_first([report.problem for report in reports])
        found |= {report.damage.key: report.damage for report in reports if report.damage}
        left -= len(reports)
    # Objects of lists that are of other groups, and those that were known to be damaged.
    progress.advance(left)
    return found


def verify_object(task: VerifyTask) -> VerifyReport:
    """Read the task's object."""
    one = task.one
    try:
        read_listed(task.store.open(), one.node, one.key, (one.stored.size, one.stored.digest))
    except ObjectDamagedError as error:
        return VerifyReport(Damage(one.key, one.node, error.kind, error.detail))
    except SnapshotError as error:
        return VerifyReport(problem=report_of(error))
    return VerifyReport()
