"""The global transactions that were in doubt at a cut: prepared on some node, and not decided there.

A coordinator that recovers asks for them. In what is restored each has been decided, the same way on all its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import UnsetType

from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.commits import increment_label
from cutline.storage.errors import RefusedError
from cutline.wal.cut.cut_values import InDoubt, NodeCut

COMMITTED, ROLLED_BACK = "commit", "rollback"


class InDoubtUnknownError(RefusedError):
    """The commit does not list what was in doubt at its cut."""


@dataclass(frozen=True, slots=True)
class InDoubtTransaction:
    """A global transaction, its decision, and its part on each node: prepared at the cut, or committed before it."""

    global_id: str
    decision: str
    parts: tuple[tuple[str, InDoubt], ...]

    def to_json(self) -> dict[str, Any]:
        """The transaction as scripts read it."""
        nodes = [{"node": node, "gid": part.gid, "state": state_of(part)} for node, part in self.parts]
        return {"global_id": self.global_id, "decision": self.decision, "nodes": nodes}


def state_of(part: InDoubt) -> str:
    """What the part was on its node at the cut."""
    return "prepared" if part.is_prepared else "committed"


def decision_of(part: InDoubt) -> str:
    """How the part's transaction is decided in what is restored."""
    return COMMITTED if part.is_included else ROLLED_BACK


def in_doubt_on(commit: Commit, cut: NodeCut) -> tuple[InDoubt, ...]:
    """What was in doubt on the node of this cut; raise InDoubtUnknownError if the commit does not say."""
    if isinstance(cut.in_doubt, UnsetType):
        raise InDoubtUnknownError(
            f"{increment_label(commit.snapshot, commit.increment)} does not list the transactions that were in doubt at"
            " its cut: an earlier version began its chain",
            hint="take a restore point: snapshot create NAME --only-cut   or a new full snapshot: snapshot create NAME",
            details={"snapshot": commit.snapshot, "increment": commit.increment},
        )
    return cut.in_doubt


def find_in_doubt(commit: Commit) -> tuple[InDoubtTransaction, ...] | None:
    """The transactions in doubt at the commit's cut; None if the commit does not list them."""
    try:
        return in_doubt_transactions(commit)
    except InDoubtUnknownError:
        return None


def in_doubt_transactions(commit: Commit) -> tuple[InDoubtTransaction, ...]:
    """The transactions in doubt at the commit's cut, ordered by global id; raise InDoubtUnknownError."""
    parts: dict[str, list[tuple[str, InDoubt]]] = {}
    for cut in commit.cut.nodes:
        for part in in_doubt_on(commit, cut):
            parts.setdefault(part.global_id, []).append((cut.node, part))
    return tuple(
        InDoubtTransaction(global_id, decision_of(found[0][1]), tuple(found))
        for global_id, found in sorted(parts.items())
    )
