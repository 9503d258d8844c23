"""A restore is estimated by a recent one of about its size."""

from __future__ import annotations

from pathlib import Path

from cutline.restore.estimates.estimate import COMPARED_MAX, read_measured
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.operation import current_time, list_decided
from cutline.snapshots.records.operation_records import Decision, Outcome, RestoreFigures, write_operation_record
from cutline.storage.local import LocalStore


def measured(store: LocalStore, rows: int) -> int | None:
    found = read_measured(store, list_decided(document_names(store)), rows)
    return int(found[0][-2:]) if found else None


def test_the_nearest_size_of_the_newest_restores_counts(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert measured(store, 1000) is None
    sizes = [1000, 50, 10**6, 900, 2000, 10**9, 50]
    for number, rows in enumerate(sizes):
        operation = f"20261123T0000{number:02}Z-abcdef00{number:02}"
        figures = RestoreFigures(rows, 0, 1.0, {}, {}, transactions=0)
        write_operation_record(
            store, "decision", Decision(operation=operation, decision="publish", by="", decided_at=current_time())
        )
        write_operation_record(
            store,
            "outcome",
            Outcome(
                operation=operation,
                kind="restore",
                snapshot="daily",
                state="done",
                reason="",
                ended_at=current_time(),
                figures=figures,
            ),
        )
    assert len(sizes) == COMPARED_MAX + 2
    # The first two are too long ago. 10,000 rows are nearer to 2,000 than to a million, by their ratio.
    assert [measured(store, rows) for rows in (1000, 10, 0, 10_000, 10**8)] == [3, 6, 6, 4, 5]
