"""What a check finds, and its result.

A check that compared nothing, or skipped anything, is inconclusive: it never passes because there was nothing to
compare (docs/architecture.md, invariant 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cutline.fleet.record import to_builtins
from cutline.fleet.tables.left_out import LeftOut
from cutline.snapshots.operations.open_operations import OpenOperation
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.operation_records import (
    CONFLICTS,
    INCONCLUSIVE,
    VALID,
    CheckFigures,
    CheckResult,
    SkippedPart,
)

SCHEMA = "cutline/check/1"
EXIT_CODES: Mapping[CheckResult, int] = {VALID: 0, CONFLICTS: 1, INCONCLUSIVE: 4}
# Of what was skipped, outcomes have so many examples.
EXAMPLES_MAX = 20


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something that is wrong with a snapshot. Fields that do not apply are None."""

    kind: str
    detail: str
    node: str | None = None
    other_node: str | None = None
    group: str | None = None
    partition: int | None = None
    object: str | None = None
    global_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The conflict as scripts read it."""
        names = ("kind", "node", "other_node", "group", "partition", "object", "global_id", "detail")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not compared, and why."""

    what: str
    why: str


@dataclass(slots=True)
class Compared:
    """How much was compared."""

    objects: int = 0
    bytes: int = 0
    rows: int = 0
    changes: int = 0
    partitions: int = 0
    transactions: int = 0


@dataclass(slots=True)
class SnapshotReport:
    """The check of one snapshot up to `increment`.

    `append_only`: groups whose updates and deletes are not captured. `warned`: these groups, and everything else that a
    restore may bring back different. `large_objects`: how many were read back intact; they are compared with nothing.
    """

    name: str
    increment: int
    compared: Compared = field(default_factory=Compared)
    skipped: list[Skipped] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    append_only: list[str] = field(default_factory=list)
    warned: tuple[LeftOut, ...] = ()
    large_objects: int = 0

    @property
    def result(self) -> CheckResult:
        """Valid only if something was compared and nothing was skipped."""
        if self.conflicts:
            return CONFLICTS
        return INCONCLUSIVE if self.skipped or not self.compared.objects else VALID

    @property
    def figures(self) -> CheckFigures:
        """What the check's outcome records of the snapshot."""
        examples = (SkippedPart(shortened(one.what), shortened(one.why)) for one in self.skipped[:EXAMPLES_MAX])
        return CheckFigures(asdict(self.compared), len(self.conflicts), len(self.skipped), tuple(examples))

    def to_json(self) -> dict[str, Any]:
        """The snapshot's part of the JSON document."""
        names = ("objects", "bytes", "rows", "changes", "partitions", "transactions")
        return {
            "name": self.name,
            "increment": self.increment,
            "result": self.result,
            "compared": {name: getattr(self.compared, name) for name in names},
            "append_only": self.append_only,
            "large_objects": self.large_objects,
            "warned": to_builtins(self.warned),
            "skipped": [{"what": one.what, "why": one.why} for one in self.skipped],
            "conflicts": [one.to_json() for one in self.conflicts],
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The check of one or more snapshots, and the operations on them that had no outcome when it began."""

    snapshots: tuple[SnapshotReport, ...]
    seconds: float
    open_operations: tuple[OpenOperation, ...] = ()

    @property
    def result(self) -> CheckResult:
        """The worst of the snapshots' results; inconclusive if there are no snapshots."""
        results = {one.result for one in self.snapshots}
        if CONFLICTS in results:
            return CONFLICTS
        return VALID if results == {VALID} else INCONCLUSIVE

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        return EXIT_CODES[self.result]

    def to_json(self) -> dict[str, Any]:
        """The whole JSON document."""
        return {
            "schema": SCHEMA,
            "result": self.result,
            "seconds": round(self.seconds, 3),
            "snapshots": [one.to_json() for one in self.snapshots],
            "open_operations": [one.to_json() for one in self.open_operations],
        }
