"""Facts about a cut for users of physical backups and for coordinators: as text, as JSON, and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.cli.output.tables import FittingTable
from cutline.fleet.own_files import replaced_file
from cutline.snapshots.listing.recovery_plan import InDoubtTransaction, NodeRecovery, state_of
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import increment_label
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

TRANSACTIONS_SCHEMA = "cutline/transactions/1"
WARNING = "warning: "
AFTERWARDS = "once every node is promoted and its statements have run, applications may connect"


def transaction_lines(commit: Commit, transactions: Sequence[InDoubtTransaction]) -> list[str | RenderableType]:
    """Return the transactions in doubt as a table."""
    label = increment_label(commit.snapshot, commit.increment)
    if not transactions:
        return [f"no transaction was in doubt at the cut of {label}"]
    rows = [
        (*((transaction.global_id, transaction.decision) if number == 0 else ("", "")), node, state_of(part), part.gid)
        for transaction in transactions
        for number, (node, part) in enumerate(transaction.parts)
    ]
    return [FittingTable(("global id", "decision", "node", "at the cut", "gid"), rows)]


def plan_lines(commit: Commit, nodes: Sequence[NodeRecovery]) -> list[str | RenderableType]:
    """Return a recovery plan as text to paste: everything except settings and statements is a comment."""
    label = increment_label(commit.snapshot, commit.increment)
    lines: list[str | RenderableType] = [f"# {label}, cut {commit.cut.id}"]
    for node in nodes:
        lines += [
            "",
            f"# node {node.node}: restore a backup that ended before {node.target}; with restore_command and an empty",
            f"# recovery.signal, add to postgresql.auto.conf (needs WAL through {node.wal_through}):",
            *node.configuration,
            f"-- node {node.node}, in database {node.database}, once it is promoted and before applications connect"
            + ("" if node.statements else ": nothing to decide"),
            *node.statements,
        ]
    return [*lines, "", f"# {AFTERWARDS}"]


def write_transactions(
    label: tuple[str, int], transactions: Sequence[InDoubtTransaction] | None, folder: Path
) -> list[str]:
    """Write the transactions in doubt at the cut of an increment to a file in `folder`; return lines that name it.

    Writes nothing if no transaction was in doubt, or if that is unknown (None).
    """
    name, increment = label
    if not transactions:
        return []
    document = {
        "schema": TRANSACTIONS_SCHEMA,
        "snapshot": name,
        "increment": increment,
        "transactions": [transaction.to_json() for transaction in transactions],
    }
    path = folder / f"{name}-{increment}-transactions.json"
    what = f"transactions in doubt at the cut of {increment_label(name, increment)}: {len(transactions)}"
    again = f"; list them with snapshot show {name} --increment {increment} --transactions"
    try:
        with replaced_file(path) as write:
            write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    except UsageError as error:
        return [f"{WARNING}{what}; they can't be written to {error.message}{again}"]
    return [f"{what}; their decisions are in {path}{again}"]
