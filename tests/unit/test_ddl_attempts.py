"""Which errors of a copy concurrent DDL explains, and how long attempts are repeated."""

from __future__ import annotations

import pytest

import cutline.snapshots.ddl.attempts
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.connections import CopyError
from cutline.nodes.groups import SchemaChangedError
from cutline.snapshots.ddl.attempts import ChangedError, invalidate_if, retry_until_unchanged


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [("42P01", ChangedError), ("40001", ChangedError), ("57P01", CopyError), ("08006", CopyError), ("", CopyError)],
)
def test_a_server_that_goes_away_was_not_ended_by_ddl(sqlstate: str, expected: type[Exception]) -> None:
    details = {"node": "s1-b1"} | ({"sqlstate": sqlstate} if sqlstate else {})
    with pytest.raises(expected), invalidate_if(lambda: "node s1: its catalogs changed"):
        raise CopyError("node s1-b1: copying table a stopped", hint="repeat the command", details=details)


def test_attempts_are_repeated_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.snapshots.ddl.attempts, "PAUSE_SECONDS", 0.1)
    noting, tried = Noting(Silent()), list[int]()

    def attempt() -> int:
        tried.append(len(tried))
        if len(tried) < 7:
            raise ChangedError("node s1: its catalogs changed")
        return len(tried)

    assert retry_until_unchanged(attempt, 3, 60.0, noting) == 7
    assert [note.partition(" was")[0] for note in noting.notes] == [f"attempt {number}" for number in range(1, 7)]

    def always() -> None:
        raise ChangedError("node s1: its catalogs changed")

    with pytest.raises(SchemaChangedError, match="during each of 2 attempts"):
        retry_until_unchanged(always, 1, 0.0, Silent())
    with pytest.raises(SchemaChangedError, match=r"during each of \d{1,2} attempts"):
        retry_until_unchanged(always, 1, 0.8, Silent())
