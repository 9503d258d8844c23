"""Read stored large objects back: verify their digests, definitions, order and number.

Only the primary's large objects are stored, so they can't be compared with another copy. The report counts them
separately.

A task copies a range of oids in ascending order, so the oids of each object are a range that no other object of the
node touches. Tasks report these ranges, and the driver compares them: an oid in two objects would be loaded twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from cutline.check.report import Conflict, Findings, conflict_of
from cutline.fleet.progress import Progress
from cutline.snapshots.base_copy.large_objects import PartOrder, read_parts
from cutline.snapshots.ddl.contradictions import PREDEFINED
from cutline.snapshots.records.commit import (
    LARGE_OBJECTS_COUNT,
    FullSnapshot,
    LargeObjectDefinition,
    StoredObject,
    group_by_copy_task,
    is_no_role,
    list_large_objects,
)
from cutline.spark.spark_jobs import Dealing, NodeShares, if_shared, run_tasks
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class LargeCheckTask(Struct, frozen=True):
    """The stored objects written by a single copy task, in order; `roles` are those of the server, if known."""

    objects: tuple[StoredObject, ...]
    store: StoreLocation
    roles: frozenset[str] | None = None


class LargeReading(NamedTuple):
    """What reading an object has shown: its problem, or the lowest and the highest oid of the large objects in it.

    The oids are 0 if no large object begins in the object.
    """

    problem: ErrorReport | None
    low: int = 0
    high: int = 0


class OidRange(NamedTuple):
    """The lowest and the highest oid of the large objects that begin in an object, and the object's key."""

    low: int
    high: int
    key: str


def check_large_objects(
    session: SparkSession,
    full: FullSnapshot,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    roles: Mapping[str, frozenset[str]],
) -> None:
    """Read all stored large objects; a damaged object is a conflict, but the rows of its node are still compared.

    `roles` are the roles of the shards' servers, where they are known. Raises a task's error if the store did not
    answer that task.
    """
    tasks = [
        LargeCheckTask(objects, store, roles.get(objects[0].node))
        for objects in group_by_copy_task(list_large_objects(full))
    ]
    if not tasks:
        return
    progress.step("read large objects", total=len(tasks), unit="tasks")
    dealing = Dealing[LargeCheckTask](lambda task: sum(stored_object.size for stored_object in task.objects))
    shares = NodeShares[LargeCheckTask].of_tasks(
        progress,
        tasks,
        lambda task: task.objects[0].node,
        lambda task: sum(stored_object.size for stored_object in task.objects),
    )
    shares.begin()
    ranges: dict[str, list[OidRange]] = {}
    found = run_tasks(session, read_large, tasks, shares, dealing, problem_of=_shared_problem)
    for task, readings in zip(tasks, found, strict=True):
        for stored, (problem, low, high) in zip(task.objects, readings, strict=True):
            if problem is None:
                findings.count(objects=1, size_bytes=stored.size)
                findings.report.large_objects += stored.rows.get(LARGE_OBJECTS_COUNT, 0)
                if high:
                    ranges.setdefault(stored.node, []).append(OidRange(low, high, stored.key))
            else:
                findings.conflict(replace(conflict_of(problem), node=stored.node, object=stored.key))
    for node, of_node in ranges.items():
        for key, detail in overlaps(of_node):
            findings.conflict(Conflict("duplicate", detail, node=node, object=key))


def overlaps(ranges: Iterable[OidRange]) -> Iterator[tuple[str, str]]:
    """Yield, for each range of a node's objects that overlaps with a lower one, the key of its object and the detail.

    The order of the tasks is not compared, because a repair may have given the objects of a task other keys.
    """
    highest: OidRange | None = None
    for one in sorted(ranges):
        if highest is not None and one.low <= highest.high:
            yield (
                one.key,
                f"it contains large objects {one.low} to {one.high}, and object {highest.key} contains {highest.low}"
                f" to {highest.high}, but the copy divides the oids between objects",
            )
        if highest is None or one.high > highest.high:
            highest = one


def _shared_problem(readings: list[LargeReading]) -> ErrorReport | None:
    return next(filter(None, (if_shared(reading.problem) for reading in readings)), None)


def read_large(task: LargeCheckTask) -> list[LargeReading]:
    """Read the task's objects, and return what each of them has shown."""
    try:
        store = task.store.open()
    except SnapshotError as error:
        return [LargeReading(report_of(error))] * len(task.objects)
    order = PartOrder()
    return [_read(store, stored, order, task.roles) for stored in task.objects]


def _read(store: ObjectStore, stored: StoredObject, order: PartOrder, roles: frozenset[str] | None) -> LargeReading:
    low = high = count = 0
    try:
        body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
        for parts in read_parts(stored, body, order):
            for oid, definition in ((part.oid, part.definition) for part in parts if part.definition):
                # PartOrder has verified that the oids ascend.
                low, high, count = low or oid, oid, count + 1
                if unknown := unknown_roles(definition, roles):
                    detail = f"large object {oid} names role {unknown[0]}, which the stored roles of its server lack"
                    raise ObjectDamagedError(key=stored.key, kind="roles", node=stored.node, detail=detail)
        if count != stored.rows.get(LARGE_OBJECTS_COUNT, 0):
            detail = f"it contains {count:,} large objects instead of {stored.rows.get(LARGE_OBJECTS_COUNT, 0):,}"
            raise ObjectDamagedError(key=stored.key, kind="rows", node=stored.node, detail=detail)
    except SnapshotError as error:
        order.interrupt()
        return LargeReading(report_of(error))
    return LargeReading(None, low, high)


def unknown_roles(definition: LargeObjectDefinition, roles: frozenset[str] | None) -> list[str]:
    """Return the roles that a large object's definition names, and that are not among the server's `roles`, if known.

    Leaves out predefined roles, roles that did not exist there, and names that two databases may write differently.
    """
    named = {definition.owner}
    for grant in definition.grants or ():
        named |= {grant.grantor, grant.grantee}
    return sorted(
        role
        for role in named - (named if roles is None else roles)
        if role and role.isascii() and not role.startswith(PREDEFINED) and not is_no_role(role)
    )
