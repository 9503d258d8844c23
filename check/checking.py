"""One snapshot's check while it runs: what it is about, and what has been found so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from check.copies import Copies
from check.report import Conflict, SnapshotReport
from snapshots.chain import Chain
from storage.errors import ReportedError, UnreachableError
from storage.store import ObjectStore


@dataclass(slots=True)
class Checking:
    """One snapshot's check under way."""

    chain: Chain
    store: ObjectStore
    location: tuple[str, dict[str, Any]]
    report: SnapshotReport
    damaged: set[str]

    @property
    def copies(self) -> Copies:
        """The chain's copies, numbered as in the jobs."""
        return Copies.of(self.chain)

    def problem(self, report: Mapping[str, Any]) -> None:
        """Note what is wrong with an object; its node's copy can't be compared.

        Raises ReportedError where the store did not answer: that says nothing of what is in it.
        """
        if report["exit_code"] == UnreachableError.exit_code:
            raise ReportedError(dict(report))
        details = report["details"]
        node = details.get("node")
        conflict = Conflict(
            kind=str(details.get("kind", report["slug"])),
            detail=str(report["message"]),
            node=node,
            object=details.get("object"),
        )
        if conflict.object not in {one.object for one in self.report.conflicts if one.object}:
            self.report.conflicts.append(conflict)
        if node:
            self.damaged.add(node)
