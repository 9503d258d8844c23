"""What PostgreSQL's counters show of an append-only table between two readings, and what they can't show."""

from __future__ import annotations

import pytest

from cutline.nodes.table_state import AppendOnlyChangedError, Counters, check_counters, unknown_counters_warnings

FIRST, LATER, NOTHING = "since the start", "since a crash", ""


def counters(updated: int, deleted: int, since: str = FIRST) -> dict[str, Counters]:
    return {"t.log": Counters(updated, deleted, since), "t.quiet": Counters(7, 7, since)}


@pytest.mark.parametrize(("was", "now", "counted"), [
    (counters(0, 0), counters(3, 0), "3 rows updated, 0 deleted"),
    (counters(5, 1), counters(5, 3), "0 rows updated, 2 deleted"),
    # The counters were lost and began again: what they count now came after the last reading.
    (counters(0, 0), counters(1, 0, LATER), "1 rows updated, 0 deleted"),
    (counters(5, 1), counters(2, 0, LATER), "2 rows updated, 0 deleted"),
    # Only the counters of another table were reset: these continue.
    (counters(5, 1), counters(6, 1, LATER), "1 rows updated, 0 deleted"),
    (counters(0, 0), counters(1, 0, NOTHING), "1 rows updated, 0 deleted"),
])  # fmt: skip
def test_updates_and_deletes_since_the_last_reading_are_refused(
    was: dict[str, Counters], now: dict[str, Counters], counted: str
) -> None:
    with pytest.raises(AppendOnlyChangedError) as raised:
        check_counters("s1", "increment 3", was, now)
    expected = "since increment 3, perhaps by transactions that were rolled back, and can't be identified:"
    assert f"{expected} t.log ({counted})" in raised.value.message
    assert "t.quiet" not in raised.value.message
    assert "increment 3 itself may lack the earliest" in raised.value.message
    assert raised.value.details == {"node": "s1", "tables": ["t.log"]}


@pytest.mark.parametrize(("was", "now", "named"), [
    (counters(0, 0), counters(0, 0), []),
    (counters(5, 1), counters(5, 1), []),
    (counters(0, 0), counters(0, 0, LATER), ["t.log", "t.quiet"]),
    (counters(5, 1), counters(0, 0, LATER), ["t.log", "t.quiet"]),
    (counters(5, 1), counters(0, 0), ["t.log"]),
    (counters(0, 0), counters(0, 0, NOTHING), ["t.log", "t.quiet"]),
    (counters(0, 0, NOTHING), counters(0, 0), ["t.log", "t.quiet"]),
    (counters(0, 0, NOTHING), counters(0, 0, NOTHING), ["t.log", "t.quiet"]),
])  # fmt: skip
def test_counters_that_were_lost_are_a_warning(
    was: dict[str, Counters], now: dict[str, Counters], named: list[str]
) -> None:
    check_counters("s1", "increment 3", was, now)
    found = unknown_counters_warnings("s1", was, now)
    assert [one.name for one in found] == named
    assert {(one.node, one.kind) for one in found} <= {("s1", "uncounted_table")}


def test_a_table_that_only_one_reading_has_is_ignored() -> None:
    check_counters("s1", "the full snapshot", {}, counters(3, 3))
    check_counters("s1", "the full snapshot", counters(3, 3), {})
    assert unknown_counters_warnings("s1", {}, counters(0, 0, LATER)) == []
