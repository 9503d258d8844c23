"""Which errors of a copy concurrent DDL explains."""

from __future__ import annotations

import pytest

from cutline.nodes.connections import CopyError
from cutline.snapshots.ddl.attempts import ChangedError, invalidate_if


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [("42P01", ChangedError), ("40001", ChangedError), ("57P01", CopyError), ("08006", CopyError), ("", CopyError)],
)
def test_a_server_that_goes_away_was_not_ended_by_ddl(sqlstate: str, expected: type[Exception]) -> None:
    details = {"node": "s1-b1"} | ({"sqlstate": sqlstate} if sqlstate else {})
    with pytest.raises(expected), invalidate_if(lambda: "node s1: its catalogs changed"):
        raise CopyError("node s1-b1: copying table a stopped", hint="repeat the command", details=details)
