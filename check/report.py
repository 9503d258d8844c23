"""The findings and the result of a check.

A check that compared nothing, or skipped something, is inconclusive (docs/architecture.md, invariant 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from cutline.fleet.record import Time, to_builtins
from cutline.nodes.left_out import LeftOut
from cutline.snapshots.operations.open_operations import OpenOperation
from cutline.snapshots.records.chain import RenewalGap
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.operation_records import (
    CONFLICTS,
    INCONCLUSIVE,
    ONE_COPY,
    SPANS_MAX,
    VALID,
    CheckFigures,
    CheckResult,
    ReadTimes,
    SkippedPart,
)
from cutline.storage.errors import NOT_OF_THE_OBJECT, ErrorReport, error_of

SCHEMA = "cutline/check/1"
EXIT_CODES: Mapping[CheckResult, int] = {VALID: 0, ONE_COPY: 0, CONFLICTS: 1, INCONCLUSIVE: 4}
# An outcome lists at most this many examples of skipped parts.
EXAMPLES_MAX = 20


class StoredRow(Struct, frozen=True):
    """A row in the copy of `node`: its `line`, `count` times, from `object`, which `increment` lists.

    A `line` that ends with … is longer. If it is None, the copy lacks the row. `position`, `xid` and `global_id` are
    those of the transaction that wrote the row; None for a row of a base copy, and for a row without a key.
    """

    node: str
    line: str | None = None
    count: int = 0
    object: str | None = None
    increment: int | None = None
    position: str | None = None
    xid: int | None = None
    global_id: str | None = None


class DifferentRow(Struct, frozen=True):
    """A row that the copies of a shard have differently. `outvoted` lists the copies that most others contradict."""

    key: str
    copies: tuple[StoredRow, ...]
    outvoted: tuple[str, ...] = ()


class Conflict(Struct, frozen=True):
    """A defect of a snapshot. Fields that do not apply are None.

    `rows` names some of the rows that differ; `rows_unnamed` is the reason if they were searched for in vain.
    """

    kind: str
    detail: str
    node: str | None = None
    other_node: str | None = None
    group: str | None = None
    partition: int | None = None
    object: str | None = None
    global_id: str | None = None
    rows: tuple[DifferentRow, ...] = ()
    rows_unnamed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the conflict for the JSON document."""
        names = ("kind", "node", "other_node", "group", "partition", "object", "global_id", "detail", "rows_unnamed")
        return {name: getattr(self, name) for name in names} | {"rows": to_builtins(self.rows)}


class Doubt(Struct, frozen=True):
    """Something that damage would explain, but that has another explanation as well. It does not change the result.

    Fields that do not apply are None.
    """

    kind: str
    detail: str
    node: str | None = None
    group: str | None = None
    object: str | None = None


class Skipped(Struct, frozen=True):
    """A part of a snapshot that was not compared, and the reason.

    `is_one_copy`: there is no second copy of it. `is_absent`: the last increment leaves the copy out.
    """

    what: str
    why: str
    is_one_copy: bool = False
    is_absent: bool = False


class UncomparedPoints(Struct, frozen=True):
    """A part of the restore points from increment `first` to `last` (0 is the full snapshot) that was not compared.

    It had no second copy there, and `why` says why. Later restore points don't lack it, so it does not change the
    result; a check of one of these restore points is inconclusive, unless it `is_one_copy` and that is allowed.
    """

    first: int
    last: int
    what: str
    why: str
    is_one_copy: bool = False


class Compared(Struct):
    """The amounts that were compared.

    `rows_read_once` were read back, but not compared: all copies of their shard begin with the same objects.
    """

    objects: int = 0
    bytes: int = 0
    rows: int = 0
    changes: int = 0
    partitions: int = 0
    transactions: int = 0
    rows_read_once: int = 0


class RestsOn(Struct, frozen=True):
    """The record of an earlier check that a check rests on, and the objects that it stands for.

    `operation` is the check whose record it is, and `ended_at` is when that check ended. `compared_by` is the check
    that read and compared everything, which began at `compared_at`. `objects` and `bytes` measure the objects that were
    not read now; all of them have been read since `oldest_read_at`. Rereading within `reread_seconds` is required.
    `reread_objects` and `reread_bytes` were read again now; `left_objects` and `left_bytes` should have been, but no
    time was left.
    """

    operation: str
    ended_at: Time
    compared_by: str
    compared_at: Time
    oldest_read_at: Time
    reread_seconds: float
    objects: int = 0
    bytes: int = 0
    reread_objects: int = 0
    reread_bytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0


class SnapshotReport(Struct):
    """The report on a snapshot up to `increment`.

    `append_only` are the groups whose updates and deletes are not captured; `warned` are these groups and everything
    else that may differ after a restore. `large_objects` counts the large objects that were read back intact; there is
    no other copy to compare them with. `allows_one_copy`: the same is allowed for the rows of shards. `shards` contains
    how many copies each shard has that reach the cut: the objects, rows and changes of all copies are counted. It is
    empty for a restore point without rows. `doubts` do not change the result.

    `unknown_participants` counts the global transactions whose participants are not known (None: it was not counted):
    if such a transaction is missing altogether on a shard, a check can't tell. `foreign_participants` are names of
    participants that belong to no shard of the snapshot.

    `exact_at` is the time between two cuts at which the copies were compared as well, if any.

    `gaps` are those before increments that no earlier check, on whose record this one rests, has read. Earlier checks
    have named the gaps before increments up to `gaps_named_to`.

    `uncompared_points` are the parts of earlier restore points that no check of a later one compares.

    `rests_on` is None if the check used no record of an earlier check; `unused_records` is the reason if it was asked
    to; `is_partial` is set if it read only a part nevertheless. `read` is set if later checks may rest on this check.
    """

    name: str
    increment: int
    compared: Compared = field(default_factory=Compared)
    skipped: list[Skipped] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    append_only: list[str] = field(default_factory=list)
    warned: tuple[LeftOut, ...] = ()
    large_objects: int = 0
    allows_one_copy: bool = False
    shards: Mapping[str, int] = field(default_factory=dict)
    unknown_participants: int | None = None
    foreign_participants: tuple[str, ...] = ()
    rests_on: RestsOn | None = None
    unused_records: str = ""
    is_partial: bool = False
    read: ReadTimes | None = None
    doubts: list[Doubt] = field(default_factory=list)
    exact_at: Time | None = None
    uncompared_points: tuple[UncomparedPoints, ...] = ()
    gaps: tuple[RenewalGap, ...] = ()
    gaps_named_to: int = 0

    @property
    def result(self) -> CheckResult:
        """The result: without conflicts, valid only if something was compared and nothing was skipped.

        An earlier check on whose record this check rests has compared something. If rows were skipped only because they
        have one copy, and that is allowed, the result is ONE_COPY.
        """
        if self.conflicts:
            return CONFLICTS
        if not self.is_complete or any(part.is_absent for part in self.skipped):
            return INCONCLUSIVE
        if not self.skipped:
            return VALID
        return ONE_COPY if self.allows_one_copy else INCONCLUSIVE

    @property
    def copies(self) -> tuple[int, ...]:
        """How many copies the shards have, in ascending order."""
        return tuple(sorted(set(self.shards.values())))

    @property
    def skipped_by_cause(self) -> list[Skipped]:
        """The skipped parts; those that fleet.toml allows come last, because they don't decide the result."""
        return sorted(self.skipped, key=lambda part: part.is_one_copy and self.allows_one_copy)

    @property
    def reads_all(self) -> bool:
        """Whether the check was to read everything up to its increment."""
        return self.rests_on is None and not self.is_partial

    @property
    def is_complete(self) -> bool:
        """Whether all copies that reach the cut were compared and agree; there may be only one of a shard."""
        is_compared = bool(self.compared.objects) or self.rests_on is not None
        return not self.conflicts and is_compared and all(part.is_one_copy or part.is_absent for part in self.skipped)

    @property
    def uncompared_spans(self) -> tuple[tuple[int, int], ...]:
        """The earlier restore points of which a check would be inconclusive, as first and last increments, in order.

        If there are more than SPANS_MAX spans, the last spans are one.
        """
        spans: list[tuple[int, int]] = []
        for points in sorted(self.uncompared_points, key=lambda points: points.first):
            if points.is_one_copy and self.allows_one_copy:
                continue
            if spans and (points.first <= spans[-1][1] + 1 or len(spans) == SPANS_MAX):
                spans[-1] = (spans[-1][0], max(spans[-1][1], points.last))
            else:
                spans.append((points.first, points.last))
        return tuple(spans)

    @property
    def figures(self) -> CheckFigures:
        """The snapshot's figures in the outcome of the check."""
        examples = (
            SkippedPart(shortened(skipped.what), shortened(skipped.why))
            for skipped in self.skipped_by_cause[:EXAMPLES_MAX]
        )
        return CheckFigures(asdict(self.compared), len(self.conflicts), len(self.skipped), tuple(examples))

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot's part of the JSON document."""
        names = ("objects", "bytes", "rows", "changes", "partitions", "transactions", "rows_read_once")
        return {
            "name": self.name,
            "increment": self.increment,
            "exact_at": self.exact_at,
            "result": self.result,
            "compared": {name: getattr(self.compared, name) for name in names},
            "append_only": self.append_only,
            "large_objects": self.large_objects,
            "unknown_participants": self.unknown_participants,
            "foreign_participants": list(self.foreign_participants),
            "rests_on": asdict(self.rests_on) if self.rests_on else None,
            "unused_records": self.unused_records or None,
            "warned": to_builtins(self.warned),
            "skipped": [asdict(skipped) for skipped in self.skipped_by_cause],
            "uncompared_points": [asdict(points) for points in self.uncompared_points],
            "gaps": [asdict(gap) for gap in self.gaps],
            "conflicts": [conflict.to_json() for conflict in self.conflicts],
            "doubts": [asdict(doubt) for doubt in self.doubts],
        }


class CheckReport(Struct, frozen=True):
    """The reports on all checked snapshots, and their operations that had no outcome when the check started."""

    snapshots: tuple[SnapshotReport, ...]
    seconds: float
    open_operations: tuple[OpenOperation, ...] = ()

    @property
    def result(self) -> CheckResult:
        """The worst of the snapshots' results; inconclusive if there are no snapshots."""
        results = {snapshot.result for snapshot in self.snapshots}
        if CONFLICTS in results:
            return CONFLICTS
        if not results or INCONCLUSIVE in results:
            return INCONCLUSIVE
        return ONE_COPY if ONE_COPY in results else VALID

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        return EXIT_CODES[self.result]

    @property
    def rests_on_records(self) -> bool:
        """Whether the result on any snapshot rests on the record of an earlier check."""
        return any(snapshot.rests_on for snapshot in self.snapshots)

    def to_json(self) -> dict[str, Any]:
        """Return the whole JSON document."""
        return {
            "schema": SCHEMA,
            "result": self.result,
            "rests_on_records": self.rests_on_records,
            "seconds": round(self.seconds, 3),
            "snapshots": [snapshot.to_json() for snapshot in self.snapshots],
            "open_operations": [open_operation.to_json() for open_operation in self.open_operations],
        }


class Findings(Struct):
    """The report under construction, and the nodes whose copies are damaged."""

    report: SnapshotReport
    damaged: set[str] = field(default_factory=set)
    # The objects that the first `_indexed` conflicts name: a store may lack a million objects.
    _named: set[str] = field(default_factory=set)
    _indexed: int = 0

    def count(
        self, *, objects: int = 0, size_bytes: int = 0, rows: int = 0, changes: int = 0, rows_read_once: int = 0
    ) -> None:
        """Add to the amounts compared."""
        compared = self.report.compared
        compared.objects += objects
        compared.bytes += size_bytes
        compared.rows += rows
        compared.changes += changes
        compared.rows_read_once += rows_read_once

    def conflict(self, conflict: Conflict) -> None:
        """Add a conflict to the report."""
        self.report.conflicts.append(conflict)

    def skip(self, part: Skipped) -> None:
        """Add a skipped part to the report once: a check may compare several parts of a chain."""
        if part not in self.report.skipped:
            self.report.skipped.append(part)

    def doubt(self, doubt: Doubt) -> None:
        """Add a doubt to the report."""
        self.report.doubts.append(doubt)

    def damage(self, problem: ErrorReport) -> None:
        """Add a damaged object to the report once, and exclude its node's copy from the comparison.

        Raises the problem's error instead if the store did not answer or can't be opened (NOT_OF_THE_OBJECT).
        """
        if problem["exit_code"] in NOT_OF_THE_OBJECT:
            raise error_of(problem)
        conflict = conflict_of(problem)
        if not self._is_named(conflict.object):
            self.conflict(conflict)
        if conflict.node:
            self.damaged.add(conflict.node)

    def _is_named(self, key: str | None) -> bool:
        """Whether a conflict is about this object. Conflicts are only added, also to the report itself."""
        added = self.report.conflicts[self._indexed :]
        self._named.update(conflict.object for conflict in added if conflict.object)
        self._indexed += len(added)
        return key in self._named


def conflict_of(problem: ErrorReport) -> Conflict:
    """Return the conflict for the error that a task reported about an object."""
    details = problem["details"]

    def text(name: str) -> str | None:
        value = details.get(name)
        return None if value is None else str(value)

    kind = text("kind") or problem["slug"]
    return Conflict(kind, problem["message"], node=text("node"), object=text("object"))
