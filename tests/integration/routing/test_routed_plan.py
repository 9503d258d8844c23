"""The plan of a restore with routes says how many rows each target gets, exactly where they are not divided."""

from __future__ import annotations

import pytest

from cli.output.restore_plan import plan_document, plan_lines
from fleet.progress import Silent
from restore.preview import preview_restore
from tests.integration.routing.routed_place import BAD, GOOD, SHARDS, RoutedPlace

# The rows of each shard at BAD: the full snapshot, so there are no changes.
ACCOUNTS, RATES, PERSONS, ENTRIES, BADGES = 300, 6, 201, 900, 101
LOGS = sum(100 + shard for shard in range(SHARDS))
WHOLE = ("public.person=node('t2')", "public.rate=all", "public.log=node('t2')", "*=node('t1')")
FIRST, SECOND = SHARDS * (ACCOUNTS + ENTRIES + BADGES) + RATES, SHARDS * PERSONS + RATES + LOGS


def planned(place: RoutedPlace, routes: tuple[str, ...], increment: int) -> tuple[list[tuple[int, bool]], list[str]]:
    """The rows of each target and whether they are rough, and the lines on the targets."""
    plan = place.plan(2, *routes, increment=increment)
    preview = preview_restore(plan, Silent())
    targets = plan_document(plan, preview)["targets"]
    return [(one["rows"], one["rows_are_rough"]) for one in targets], plan_lines(plan, preview)[2:4]


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        (WHOLE, [(FIRST, False), (SECOND, False)]),
        (
            ("public.account=hash(id)", *WHOLE),
            [(FIRST - SHARDS * ACCOUNTS // 2, True), (SECOND + SHARDS * ACCOUNTS // 2, True)],
        ),
    ],
)
def test_rows_that_are_not_divided_are_exact(
    place: RoutedPlace, routes: tuple[str, ...], expected: list[tuple[int, bool]]
) -> None:
    rows, lines = planned(place, routes, BAD)
    assert rows == expected
    for (count, is_rough), line in zip(expected, lines, strict=True):
        about = "roughly " if is_rough else ""
        assert f": {about}{count:,} rows, " in line


def test_changes_are_exact_only_where_a_target_gets_all_of_a_shard_or_nothing(place: RoutedPlace) -> None:
    _, lines = planned(place, WHOLE, GOOD)
    assert all(" rows and roughly " in line for line in lines)
    rows, (first, second) = planned(place, ("*=node('t2')",), GOOD)
    assert rows == [(0, False), (FIRST + SECOND + (SHARDS - 2) * RATES, False)]
    assert ": 0 rows, " in first
    assert "roughly" not in second.partition(" stored")[0]
    assert " changes" in second
