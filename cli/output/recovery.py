"""Facts about a cut for users of physical backups and for coordinators: as text, as JSON, and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.cli.output.exact_point import exact_text
from cutline.cli.output.tables import FittingTable
from cutline.fleet.own_files import replaced_file
from cutline.snapshots.listing.recovery_plan import InDoubtTransaction, NodeRecovery, state_of
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import increment_label
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cutline.snapshots.listing.exact_point import ExactPoint

TRANSACTIONS_SCHEMA = "cutline/transactions/1"
WARNING = "warning: "
AFTERWARDS = "once every node is promoted and its statements have run, applications may connect"


def transaction_lines(
    commit: Commit, transactions: Sequence[InDoubtTransaction], exact: ExactPoint | None = None
) -> list[str | RenderableType]:
    """Return the transactions in doubt at the cut of a commit, or at an exact point, as a table."""
    label = increment_label(commit.snapshot, commit.increment)
    if not transactions:
        return [f"no transaction was in doubt at {exact_text(exact.moment) if exact else f'the cut of {label}'}"]
    rows = [
        (*((transaction.global_id, transaction.decision) if number == 0 else ("", "")), node, state_of(part), part.gid)
        for transaction in transactions
        for number, (node, part) in enumerate(transaction.parts)
    ]
    return [FittingTable(("global id", "decision", "node", "at the cut", "gid"), rows)]


def plan_lines(
    commit: Commit, nodes: Sequence[NodeRecovery], exact: ExactPoint | None = None
) -> list[str | RenderableType]:
    """Return a recovery plan as text to paste: everything except settings and statements is a comment."""
    label = f"{increment_label(commit.snapshot, commit.increment)}, cut {commit.cut.id}"
    if exact:
        label = f"snapshot {commit.snapshot} at {exact_text(exact.moment)}"
    lines: list[str | RenderableType] = [f"# {label}"]
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
    label: tuple[str, int],
    transactions: Sequence[InDoubtTransaction] | None,
    folder: Path,
    exact: ExactPoint | None = None,
) -> list[str]:
    """Write the transactions in doubt at the cut of an increment to a file in `folder`; return lines that name it.

    With `exact`, they are in doubt at that point, and the increment is the first after it. Writes nothing if no
    transaction was in doubt, or if that is unknown (None).
    """
    name, increment = label
    if not transactions:
        return []
    document = {
        "schema": TRANSACTIONS_SCHEMA,
        "snapshot": name,
        "increment": increment,
        "exact_at": exact_text(exact.moment) if exact else None,
        "transactions": [transaction.to_json() for transaction in transactions],
    }
    path = folder / f"{name}-{increment}-transactions.json"
    where, option = f"the cut of {increment_label(name, increment)}", f"--increment {increment}"
    if exact:
        where, option = exact_text(exact.moment), f"--at {exact_text(exact.moment)}"
    what = f"transactions in doubt at {where}: {len(transactions)}"
    again = f"; list them with snapshot show {name} {option} --transactions"
    try:
        with replaced_file(path) as write:
            write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    except UsageError as error:
        return [f"{WARNING}{what}; they can't be written to {error.message}{again}"]
    return [f"{what}; their decisions are in {path}{again}"]
