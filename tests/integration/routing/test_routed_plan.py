"""The plan of a restore with routes says how many rows each target gets, exactly where they are not divided."""

from __future__ import annotations

import pytest

from cutline.cli.output.restore_report import plan_document, plan_lines
from cutline.fleet.progress import Silent
from cutline.restore.run.preview import preview_restore
from tests.commands.at_terminal import answer
from tests.commands.in_process import run_as_text
from tests.integration.refusing import execute
from tests.integration.routing.routed_place import BAD, GOOD, NAME, ROUTES, SHARDS, RoutedPlace

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


def test_before_it_is_confirmed_the_plan_says_where_rows_go(place: RoutedPlace) -> None:
    """Also what is left out, and what becomes of sequences; as --dry-run does, whose verdict comes after it."""
    target = place.target(2)
    execute(place.servers.dsns()[0], "CREATE DATABASE elsewhere")
    words = ["restore", NAME, "--to", str(target.path), "--increment", str(GOOD), "--replace"]
    words += [word for route in ROUTES for word in ("--route", route)]
    code, shown = answer(place.runs.fleet, "n\n", *words)
    assert (code, place.databases()) == (3, {"elsewhere"}), shown
    planned = " ".join(shown.partition("replace these databases? [y/N]")[0].split())
    checked = " ".join(run_as_text(place.runs.fleet, *words, "--dry-run").split())
    for line in (
        "s1 + s2 + s3 go to t1, t2",
        "public.entry by hash(account)",
        "public.rate by all",
        'left out: foreign key "person_account_fkey" of "public"."person" on t2: rows that it joins may be on different'
        " targets",
    ):
        assert (planned.count(line), checked.count(line)) == (1, 1), line


def test_changes_are_exact_only_where_a_target_gets_all_of_a_shard_or_nothing(place: RoutedPlace) -> None:
    _, lines = planned(place, WHOLE, GOOD)
    assert all(" rows and roughly " in line for line in lines)
    rows, (first, second) = planned(place, ("*=node('t2')",), GOOD)
    assert rows == [(0, False), (FIRST + SECOND + (SHARDS - 2) * RATES, False)]
    assert ": 0 rows, " in first
    assert "roughly" not in second.partition(" stored")[0]
    assert " changes" in second
