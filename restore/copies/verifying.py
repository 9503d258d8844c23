"""Verify the bytes of a chain's objects as a Spark job, before a restore decides from which copies it takes rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet.progress import Progress
from restore.copies.choice import CopyChoice, Wanted, choose_copies, settle_copies
from restore.copies.stored import ChainObject, CopyNeeds, Damage, Damages, find_listed_damage, list_objects, needs_other
from snapshots.operations.spark_jobs import raise_first, run_many
from snapshots.records.chain import Chain
from storage.errors import ErrorReport, SnapshotError, report_of
from storage.location import StoreLocation
from wal.segments.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A task reads one object after the other, about as many bytes.
TASK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """Objects to read and compare with their commits."""

    objects: tuple[ChainObject, ...]
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Which objects are damaged, or the error that ended the task."""

    damaged: tuple[Damage, ...] = ()
    problem: ErrorReport | None = None


def verify_copies(
    session: SparkSession, chain: Chain, wanted: Wanted, store: StoreLocation, progress: Progress
) -> CopyChoice:
    """Read what the restore needs, of the standbys only where a primary's copy is damaged, and choose the copies.

    Raises ObjectDamagedError if something is in no copy.
    """
    opened = store.open()
    damages = find_listed_damage(opened, chain)

    def verify(copies: str, nodes: Iterable[str]) -> dict[str, Damage]:
        # Counted first: there may be more than the driver can hold.
        total = sum(1 for _ in _by_bytes(_needed(chain, nodes, wanted, damages)))
        if not total:
            return {}
        progress.step(f"verify copies of {copies}", total=total, unit="tasks")
        tasks = (VerifyTask(some, store) for some in _by_bytes(_needed(chain, nodes, wanted, damages)))
        return _verify(session, tasks, progress)

    damages |= verify("primaries", wanted.nodes or chain.full.primaries)
    choice, _ = choose_copies(chain, wanted, damages)
    damaged = {chain.shard_of(one.node) for one in choice.damaged}
    damages |= verify("standbys", [one.node for one in chain.nodes if one.backup_of in damaged])
    return settle_copies(opened, chain, wanted, damages)


def _needed(chain: Chain, nodes: Iterable[str], wanted: Wanted, damages: Damages) -> Iterator[ChainObject]:
    """The objects that the wanted groups need in the copies of these nodes, and the DDL and large objects of shards.

    Without those that are known to be damaged.
    """
    for node in nodes:
        copy, numbers = CopyNeeds.of(chain, node), wanted.numbers(chain, chain.shard_of(node))
        for one in list_objects(chain, [node]):
            is_needed = copy.groups_of(one) & numbers or wanted.takes(needs_other(chain, node, one))
            if is_needed and one.key not in damages:
                yield one


def _verify(session: SparkSession, tasks: Iterable[VerifyTask], progress: Progress) -> dict[str, Damage]:
    found: dict[str, Damage] = {}
    for reports in run_many(session, verify_objects, tasks, progress):
        raise_first([report.problem for report in reports])
        found |= {damage.key: damage for report in reports for damage in report.damaged}
    return found


def _by_bytes(objects: Iterable[ChainObject]) -> Iterator[tuple[ChainObject, ...]]:
    some: list[ChainObject] = []
    size = 0
    for one in objects:
        some.append(one)
        size += one.stored.size
        if size >= TASK_BYTES:
            yield tuple(some)
            some, size = [], 0
    if some:
        yield tuple(some)


def verify_objects(task: VerifyTask) -> VerifyReport:
    """Read the task's objects."""
    damaged: list[Damage] = []
    try:
        store = task.store.open()
        for one in task.objects:
            try:
                read_listed(store, one.node, one.key, (one.stored.size, one.stored.digest))
            except ObjectDamagedError as error:
                damaged.append(Damage(one.key, one.node, error.kind, error.detail))
    except SnapshotError as error:
        return VerifyReport(problem=report_of(error))
    return VerifyReport(tuple(damaged))
