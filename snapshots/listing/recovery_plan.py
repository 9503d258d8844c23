"""Recovery plans: where to recover the physical backups of the nodes, so that together they are the state of a cut.

A cut's position is the end of a record, and its state is what begins before the position. So recovery stops before the
first record that begins there or later (recovery_target_inclusive = off). Whatever is committed before the position of
any node is in the state (docs/consistency.md), so only transactions that are still prepared need a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutline.fleet.lsn import Lsn
from cutline.snapshots.listing.in_doubt import decision_of, in_doubt_on
from cutline.snapshots.records.chain import Chain
from cutline.wal.cut.cut_values import InDoubt

# A server that stays in recovery ("pause") can't decide prepared transactions.
ACTION = "promote"


@dataclass(frozen=True, slots=True)
class NodeRecovery:
    """How one primary is recovered to a cut.

    `target` is its position, `wal_through` the end of the WAL that this takes: recovery ends at the first record after
    the target, which is the finish marker at the latest. `prepared` are the transactions that are then prepared.
    """

    node: str
    database: str
    timeline: int
    target: Lsn
    wal_through: Lsn
    prepared: tuple[InDoubt, ...]

    @property
    def settings(self) -> dict[str, str]:
        """The server's settings."""
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
        """What decides the prepared transactions, once the server is promoted."""
        verbs = {True: "COMMIT", False: "ROLLBACK"}
        return [f"{verbs[one.is_included]} PREPARED {_literal(one.gid)};" for one in self.prepared]

    def to_json(self) -> dict[str, Any]:
        """The plan as scripts read it."""
        return {
            "node": self.node,
            "database": self.database,
            **self.settings,
            "wal_through": str(self.wal_through),
            "postgresql_auto_conf": self.configuration,
            "prepared": [{"gid": one.gid, "decision": decision_of(one)} for one in self.prepared],
            "statements": self.statements,
        }


def plan_recovery(chain: Chain) -> tuple[NodeRecovery, ...]:
    """How each primary is recovered to the chain's last cut; raise InDoubtUnknownError."""
    return tuple(
        NodeRecovery(
            cut.node,
            chain.baseline[cut.node].database,
            # A chain continues on no other timeline.
            chain.baseline[cut.node].timeline,
            cut.position,
            cut.finish,
            tuple(one for one in in_doubt_on(chain.last, cut) if one.is_prepared),
        )
        for cut in chain.last.cut.nodes
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
