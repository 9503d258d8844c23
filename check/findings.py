"""What a check of one snapshot has found so far, and the copies that it therefore can't compare."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutline.check.report import Conflict, SnapshotReport
from cutline.storage.errors import ErrorReport, UnreachableError, UsageError, error_of

# The store did not answer; an executor lacks a file that fleet.toml names.
NOT_OF_THE_OBJECT = (UnreachableError.exit_code, UsageError.exit_code)


@dataclass(slots=True)
class Findings:
    """The report that is being filled in, and the nodes whose copies are damaged."""

    report: SnapshotReport
    damaged: set[str] = field(default_factory=set)

    def count(self, *, objects: int = 0, size_bytes: int = 0, rows: int = 0, changes: int = 0) -> None:
        """Add to the numbers of what was compared."""
        compared = self.report.compared
        compared.objects += objects
        compared.bytes += size_bytes
        compared.rows += rows
        compared.changes += changes

    def conflict(self, conflict: Conflict) -> None:
        """Add a conflict to the report."""
        self.report.conflicts.append(conflict)

    def damage(self, problem: ErrorReport) -> None:
        """Add a damaged object to the report, once; the copy of its node is no longer compared.

        Raises the problem if the store did not answer, or can't be asked: that says nothing about the object.
        """
        if problem["exit_code"] in NOT_OF_THE_OBJECT:
            raise error_of(problem)
        conflict = conflict_of(problem)
        if conflict.object not in {one.object for one in self.report.conflicts if one.object}:
            self.conflict(conflict)
        if conflict.node:
            self.damaged.add(conflict.node)


def conflict_of(problem: ErrorReport) -> Conflict:
    """The conflict for an error that a task raised for an object."""
    details = problem["details"]

    def text(name: str) -> str | None:
        value = details.get(name)
        return None if value is None else str(value)

    kind = text("kind") or problem["slug"]
    return Conflict(kind, problem["message"], node=text("node"), object=text("object"))
