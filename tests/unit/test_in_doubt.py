"""What is in doubt at a cut, on small cases that can be followed by hand; tests/simulation has the interleavings."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
from msgspec import structs

from cutline.cli.output.recovery import plan_lines, write_transactions
from cutline.fleet.lsn import Lsn
from cutline.snapshots.listing.recovery_plan import (
    in_doubt_transactions,
    plan_recovery,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.wal.cut.cut_values import InDoubt
from cutline.wal.cut.resolve import NodeWindow, resolve
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.unit.made_commits import MARKED_AT, full_commit

PREPARED = InDoubt("pay-1/a", "pay-1", 7, Lsn(50), is_prepared=True, is_included=True)
LATE = InDoubt("it's", "it's", 8, Lsn(60), is_prepared=True, is_included=False)
DECIDED = InDoubt("gone", "gone", 9, Lsn(70), is_prepared=False, is_included=True)


def window(*events: tuple[str, int, str, int], in_doubt: tuple[InDoubt, ...] = (), previous: int = 0) -> NodeWindow:
    """A window from `previous` with a start marker at 100; an event is its op, LSN, gid and xid, and 10 bytes long."""
    rows = [
        {
            "lsn": lsn, "end_lsn": lsn + 10, "seq": 0, "xid": xid, "global_id": gid.partition("/")[0], "op": ord(op),
            "group": 0, "partition": -1, "key": b"", "row": gid.encode() if "/" in gid else b"",
        }
        for op, lsn, gid, xid in events
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA)
    return NodeWindow(Lsn(previous), Lsn(previous + 100), Lsn(previous + 200), table, MARKED_AT, (), in_doubt)


def test_two_branches_on_one_node_are_told_apart() -> None:
    cut = resolve({"a": window(("P", 10, "g/1", 1), ("P", 20, "g/2", 2), ("K", 30, "g/1", 1))})
    (node,) = cut.nodes
    assert node.in_doubt == (
        InDoubt("g/1", "g", 1, Lsn(10), is_prepared=False, is_included=True),
        InDoubt("g/2", "g", 2, Lsn(20), is_prepared=True, is_included=True),
    )


def with_parts(*parts: InDoubt) -> Commit:
    full = full_commit()
    (node,) = full.cut.nodes
    return structs.replace(full, cut=structs.replace(full.cut, nodes=(structs.replace(node, in_doubt=parts),)))


def test_a_plan_commits_what_is_included_and_rolls_back_the_rest() -> None:
    commit = with_parts(PREPARED, LATE, DECIDED)
    (node,) = plan_recovery(Chain(commit))  # type: ignore[arg-type]
    assert node.statements == ["COMMIT PREPARED 'pay-1/a';", "ROLLBACK PREPARED 'it''s';"]
    assert node.configuration[1:] == [
        "recovery_target_inclusive = 'off'",
        "recovery_target_timeline = '1'",
        "recovery_target_action = 'promote'",
    ]
    lines = plan_lines(commit, [node])
    assert [line for line in lines if line in node.configuration + node.statements] == [
        *node.configuration, *node.statements,
    ]  # fmt: skip
    pasted = {*node.configuration, *node.statements, ""}
    assert all(str(line).startswith(("#", "--")) for line in lines if line not in pasted)


def test_a_restore_writes_what_was_in_doubt(tmp_path: Path) -> None:
    transactions = in_doubt_transactions(with_parts(PREPARED, LATE))
    (line,) = write_transactions(("daily", 3), transactions, tmp_path)
    written = json.loads((tmp_path / "daily-3-transactions.json").read_text())
    assert (written["snapshot"], written["increment"]) == ("daily", 3)
    assert written["transactions"] == [
        {"global_id": "it's", "decision": "rollback", "nodes": [{"node": "a", "gid": "it's", "state": "prepared"}]},
        {"global_id": "pay-1", "decision": "commit", "nodes": [{"node": "a", "gid": "pay-1/a", "state": "prepared"}]},
    ]
    assert "daily-3-transactions.json" in line
    assert "snapshot show daily --increment 3 --transactions" in line
    (line,) = write_transactions(("daily", 3), transactions, tmp_path / "gone")
    assert line.startswith("warning: transactions in doubt at the cut of increment 3 of daily: 2;")
