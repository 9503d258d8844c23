"""What a check of one snapshot has found so far, and which copies it can't compare for that."""

from __future__ import annotations

from dataclasses import dataclass, field

from check.report import Conflict, SnapshotReport
from storage.errors import ErrorReport, UnreachableError, error_of


@dataclass(slots=True)
class Findings:
    """The report while it grows, and the nodes whose copies are damaged."""

    report: SnapshotReport
    damaged: set[str] = field(default_factory=set)

    def count(self, *, objects: int = 0, size_bytes: int = 0, rows: int = 0, changes: int = 0) -> None:
        """Add to what was compared."""
        compared = self.report.compared
        compared.objects += objects
        compared.bytes += size_bytes
        compared.rows += rows
        compared.changes += changes

    def conflict(self, conflict: Conflict) -> None:
        """Note a conflict."""
        self.report.conflicts.append(conflict)

    def damage(self, problem: ErrorReport) -> None:
        """Note what is wrong with an object: the copy of its node can't be compared.

        Raises the error itself where the store did not answer: that says nothing of what is in it.
        """
        if problem["exit_code"] == UnreachableError.exit_code:
            raise error_of(problem)
        found = conflict_of(problem)
        if found.object not in {one.object for one in self.report.conflicts if one.object}:
            self.conflict(found)
        if found.node:
            self.damaged.add(found.node)


def conflict_of(problem: ErrorReport) -> Conflict:
    """An error that a task met with an object, as a conflict."""
    details = problem["details"]

    def text(name: str) -> str | None:
        value = details.get(name)
        return None if value is None else str(value)

    kind = text("kind") or problem["slug"]
    return Conflict(kind, problem["message"], node=text("node"), object=text("object"))
