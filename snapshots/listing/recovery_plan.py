"""Recovery plans: the position to which each node's physical backup is recovered, and the transactions in doubt.

A recovering coordinator asks for the transactions in doubt at the cut. In a restored state, each of them has been
either committed on all its nodes or rolled back on all of them.

A cut's position is the end of a record, and its state contains the records that begin before the position. So recovery
stops before the first record that begins there or later (recovery_target_inclusive = off). Every transaction committed
before the position of any node is in the state (docs/consistency.md), so only transactions that are still prepared need
a decision.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from cutline.fleet.lsn import Lsn
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.wal.cut.cut_values import InDoubt

COMMITTED, ROLLED_BACK = "commit", "rollback"


class InDoubtTransaction(Struct, frozen=True):
    """A global transaction, its decision, and its part on each node: prepared at the cut, or committed before it."""

    global_id: str
    decision: str
    parts: tuple[tuple[str, InDoubt], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the transaction for JSON output."""
        nodes = [{"node": node, "gid": part.gid, "state": state_of(part)} for node, part in self.parts]
        return {"global_id": self.global_id, "decision": self.decision, "nodes": nodes}


def state_of(part: InDoubt) -> str:
    """Return the state of the part on its node at the cut."""
    return "prepared" if part.is_prepared else "committed"


def decision_of(part: InDoubt) -> str:
    """Return the decision on the part's transaction in a restored state."""
    return COMMITTED if part.is_included else ROLLED_BACK


def in_doubt_transactions(commit: Commit) -> tuple[InDoubtTransaction, ...]:
    """Return the transactions in doubt at the commit's cut, ordered by global id."""
    parts: dict[str, list[tuple[str, InDoubt]]] = {}
    for cut in commit.cut.nodes:
        for part in cut.in_doubt:
            parts.setdefault(part.global_id, []).append((cut.node, part))
    return tuple(
        InDoubtTransaction(global_id, decision_of(found[0][1]), tuple(found))
        for global_id, found in sorted(parts.items())
    )


# A server that stays in recovery ("pause") can't commit or roll back prepared transactions.
ACTION = "promote"


class NodeRecovery(Struct, frozen=True):
    """The recovery of one primary to a cut.

    `target` is the position of the cut. `wal_through` is the end of the WAL that recovery needs: recovery stops at the
    first record after the target, which is the finish marker or an earlier record. `prepared` are the transactions that
    are prepared at that point.
    """

    node: str
    database: str
    timeline: int
    target: Lsn
    wal_through: Lsn
    prepared: tuple[InDoubt, ...]

    @property
    def settings(self) -> dict[str, str]:
        """The PostgreSQL settings of the recovery."""
        return {
            "recovery_target_lsn": str(self.target),
            "recovery_target_inclusive": "off",
            "recovery_target_timeline": str(self.timeline),
            "recovery_target_action": ACTION,
        }

    @property
    def configuration(self) -> list[str]:
        """The settings as lines of postgresql.auto.conf."""
        return [f"{name} = '{value}'" for name, value in self.settings.items()]

    @property
    def statements(self) -> list[str]:
        """The statements that commit or roll back the prepared transactions, to be run after the server is promoted."""
        verbs = {True: "COMMIT", False: "ROLLBACK"}
        return [f"{verbs[doubt.is_included]} PREPARED {_literal(doubt.gid)};" for doubt in self.prepared]

    def to_json(self) -> dict[str, Any]:
        """Return the plan for JSON output."""
        return {
            "node": self.node,
            "database": self.database,
            **self.settings,
            "wal_through": str(self.wal_through),
            "postgresql_auto_conf": self.configuration,
            "prepared": [{"gid": doubt.gid, "decision": decision_of(doubt)} for doubt in self.prepared],
            "statements": self.statements,
        }


def plan_recovery(chain: Chain) -> tuple[NodeRecovery, ...]:
    """Plan the recovery of each primary to the chain's last cut."""
    return tuple(
        NodeRecovery(
            cut.node,
            chain.baseline[cut.node].database,
            # A restore point has only one cut.
            chain.baseline[cut.node].timeline,
            cut.position,
            cut.finish,
            tuple(doubt for doubt in cut.in_doubt if doubt.is_prepared),
        )
        for cut in chain.last.cut.nodes
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
