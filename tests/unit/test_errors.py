"""An error that another process reported is raised again as the same class."""

from __future__ import annotations

import json

import pytest

from fleet.nodes.relation_locks import RelationLockedError
from storage.errors import ERRORS, ReportedError, SnapshotError, error_of, report_of
from wal.slots.slots import SlotLostError

LOST = SlotLostError("node a: its slot is gone", hint="take a new snapshot", details={"node": "a"})


@pytest.mark.parametrize("error", [LOST, RelationLockedError("node b: t is locked"), SnapshotError("a bug")])
def test_an_error_keeps_its_class_through_a_report(error: SnapshotError) -> None:
    found = error_of(json.loads(json.dumps(report_of(error))))
    assert (type(found), found.slug, found.exit_code) == (type(error), error.slug, error.exit_code)
    assert (str(found), found.message, found.hint, found.details) == (
        str(error), error.message, error.hint, error.details,
    )  # fmt: skip


def test_an_error_whose_class_is_not_loaded_keeps_code_and_slug(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(LOST)
    monkeypatch.delitem(ERRORS, "SlotLostError")
    found = error_of(report)
    assert isinstance(found, ReportedError)
    assert (found.slug, found.exit_code, found.message) == (LOST.slug, LOST.exit_code, LOST.message)
