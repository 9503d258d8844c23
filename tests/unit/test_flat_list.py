"""`list --flat`: what a row per restore point says, and CSV that other programs read as it was meant."""

from __future__ import annotations

import csv
import io
import json
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import UNSET, structs

from cutline.cli.commands.list import checks_document, entry_document, lines_of
from cutline.cli.output.flat_list import COLUMNS, csv_rows, flat_rows, flat_table
from cutline.cli.output.results import emit_csv
from cutline.cli.output.tables import FittingTable
from cutline.fleet.record import Time, from_json
from cutline.snapshots.listing.listing import Entry, Listing
from cutline.snapshots.operations.ended_operations import EndedCheck, NewestChecks
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.operation_records import CheckedPoint
from cutline.snapshots.records.proven_chains import SnapshotMissingError
from cutline.wal.drain.lags import RetainedAnswers
from tests.chains.redefined_chain import STATES, build_chain
from tests.unit.made_checks import read_times
from tests.unit.made_commits import full_commit, increment_commit, memory

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def listing_of(chain: Chain, checks: NewestChecks | None = None) -> Listing:
    entry = Entry(chain.name, chain, summaries=tuple(map(summary_of, chain.increments)))
    return Listing((entry,), RetainedAnswers((), {}), checks=checks or NewestChecks())


def commented(*comments: str) -> Chain:
    """A chain with these comments; its cuts were made at 10:00, 10:01, …"""
    commits = [full_commit(), *(increment_commit(number) for number in range(1, len(comments)))]
    for number, (commit, comment) in enumerate(zip(commits, comments, strict=True)):
        cut = structs.replace(commit.cut, made_at=Time(f"2026-11-20T10:{number:02}:00.000Z"))
        commits[number] = structs.replace(commit, comment=comment, cut=cut)
    first, *others = commits
    return Chain(first, tuple(others))


def as_csv(listing: Listing) -> str:
    out = io.StringIO(newline="")
    with redirect_stdout(out):
        emit_csv(csv_rows(flat_rows(listing)))
    return out.getvalue()


def test_a_row_names_the_tables_as_they_were_at_its_cut() -> None:
    rows = list(flat_rows(listing_of(build_chain(memory()))))
    assert [row["groups"] for row in rows] == [sorted(f"s.{table}" for table in state) for state in STATES]
    assert all(row.keys() == set(COLUMNS) for row in rows)


def test_a_row_has_its_cut_its_type_and_the_checks_of_its_restore_point() -> None:
    checks = NewestChecks()
    for hour, result in ((11, "conflicts"), (10, "valid")):
        point = from_json(
            json.dumps({"snapshot": "daily", "increment": 1, "result": result, "full": True}), CheckedPoint
        )
        checks.add(EndedCheck("op", Time(f"2026-11-20T{hour}:30:00.000Z"), point))
    full, first = flat_rows(listing_of(commented("", "b"), checks))
    assert (full["increment"], full["type"], full["base_snapshot"]) == (0, "full", None)
    assert (first["increment"], first["type"], first["base_snapshot"]) == (1, "incremental", "daily")
    assert [row["cut_at"] for row in (full, first)] == ["2026-11-20T10:00:00.000Z", "2026-11-20T10:01:00.000Z"]
    # The commands began at midnight.
    assert first["created_at"] == "2026-11-20T00:00:00Z"
    assert (full["nodes"], full["baseline_nodes"]) == (["a"], ["a", "b"])
    # A check up to an increment covers the full snapshot, too.
    for row in (full, first):
        assert (row["checked_at"], row["check_result"]) == ("2026-11-20T11:30:00.000Z", "conflicts")
        assert row["valid_at"] == "2026-11-20T10:30:00.000Z"
    *_, line = flat_table([full, first], NOW).lines(None)
    assert "conflicts 30 min ago, valid 1 h ago" in line


def test_conflicts_of_an_earlier_increment_are_told_with_where_they_were_found() -> None:
    chain, checks = commented("", "b", "c", "d"), NewestChecks()
    for minute, increment, result, is_full in (
        (10, 2, "valid", True),
        (20, 1, "conflicts", False),
        (30, 0, "valid", False),
    ):
        point = CheckedPoint("daily", increment, result, is_full)  # type: ignore[arg-type]  # one of the three
        checks.add(EndedCheck("op", Time(f"2026-11-20T11:{minute}:00.000Z"), point))
    listing = listing_of(chain, checks)
    rows = list(flat_rows(listing))
    assert [(row["check_result"], row["checked_increment"]) for row in rows] == [
        ("valid", 0), ("conflicts", 1), ("conflicts", 1), ("conflicts", 1),
    ]  # fmt: skip
    _, full, *others = flat_table(rows, NOW).lines(None)
    assert "valid 30 min ago" in full
    for line, text in zip(
        others,
        [
            "conflicts 40 min ago, valid 50 min ago",
            "conflicts at increment 1, 40 min ago, valid 50 min ago",
            "conflicts at increment 1, 40 min ago",
        ],
        strict=True,
    ):
        assert text in line
    # `list` has one cell for all of them: it tells of the conflicts before the last full check.
    table = lines_of(listing, NOW)[0]
    assert isinstance(table, FittingTable)
    assert "conflicts at increment 1, 40 min ago, valid up to 2, 50 min ago" in list(table.lines(None))[1]


def test_a_restore_point_that_a_check_names_as_not_compared_is_not_valid_by_that_check() -> None:
    chain, checks = commented("", "b", "c"), NewestChecks()
    earlier = CheckedPoint("daily", 0, "valid", full=False)
    later = CheckedPoint("daily", 2, "valid", full=True, uncompared=((0, 1),))
    for minute, point in ((10, earlier), (30, later)):
        checks.add(EndedCheck("op", Time(f"2026-11-20T11:{minute}:00.000Z"), point))
    rows = list(flat_rows(listing_of(chain, checks)))
    first, second = "2026-11-20T11:10:00.000Z", "2026-11-20T11:30:00.000Z"
    assert [(row["checked_at"], row["check_result"], row["valid_at"]) for row in rows] == [
        (first, "valid", first), (second, "inconclusive", None), (second, "valid", second),
    ]  # fmt: skip
    assert "inconclusive 30 min ago" in list(flat_table(rows, NOW).lines(None))[2]


def test_the_last_full_check_stands_alone_if_nothing_speaks_against_it() -> None:
    chain, checks = commented("", "b"), NewestChecks()
    for minute, increment, result, text in (
        (10, 1, "valid", "valid 50 min ago"),
        (20, 1, "conflicts", "conflicts 40 min ago"),
        (30, 1, "valid", "valid 30 min ago"),
    ):
        point = CheckedPoint("daily", increment, result, full=True)  # type: ignore[arg-type]  # one of the three
        checks.add(EndedCheck("op", Time(f"2026-11-20T11:{minute}:00.000Z"), point))
        table = lines_of(listing_of(chain, checks), NOW)[0]
        assert isinstance(table, FittingTable)
        assert f"  {text}" in list(table.lines(None))[1]


def test_a_check_that_rests_on_records_is_told_from_one_that_read_everything() -> None:
    chain, checks = commented("", "b"), NewestChecks()
    full, resting = (
        CheckedPoint("daily", 1, "valid", full=not by, rests_on="op-1" if by else UNSET, read=read_times(oldest))
        for by, oldest in ((False, "2026-11-10T12:00:00.000Z"), (True, "2026-11-11T12:00:00.000Z"))
    )
    for minute, point in ((10, full), (30, resting)):
        checks.add(EndedCheck("op", Time(f"2026-11-20T11:{minute}:00.000Z"), point))
    listing = listing_of(chain, checks)
    *_, row = flat_rows(listing)
    assert (row["check_result"], row["rests_on_records"]) == ("valid", True)
    assert row["oldest_read_at"] == "2026-11-11T12:00:00.000Z"
    *_, line = flat_table([row], NOW).lines(None)
    assert "valid by records 30 min ago" in line
    assert "valid 30 min ago" not in line
    table = lines_of(listing, NOW)[0]
    assert isinstance(table, FittingTable)
    title, line, *_ = table.lines(None)
    assert line[title.index("checked") :].startswith("valid by records 30 min ago")
    assert line[title.index("reread") :].startswith("9 d ago")
    document = checks_document(checks, listing.entries[0])
    assert document["last_full_check"]["rests_on_records"] is False
    assert document["last_covering_check"]["rests_on_records"] is True
    assert document["last_record"]["oldest_read_at"] == "2026-11-11T12:00:00.000Z"


@pytest.mark.parametrize(
    ("increment", "result", "text"),
    [(2, "valid", "valid 30 min ago"), (1, "valid", "valid up to 1, 30 min ago"), (1, "conflicts", "conflicts 30 min")],
)
def test_a_check_that_read_less_than_the_newest_increment_says_how_far_it_read(
    increment: int, result: str, text: str
) -> None:
    chain, checks = commented("", "b", "c"), NewestChecks()
    point = CheckedPoint("daily", increment, result, full=True)  # type: ignore[arg-type]  # one of these
    checks.add(EndedCheck("op", Time("2026-11-20T11:30:00.000Z"), point))
    table = lines_of(listing_of(chain, checks), NOW)[0]
    assert isinstance(table, FittingTable)
    title, line, *_ = table.lines(None)
    assert line[title.index("checked") :].startswith(text)


def reread_text(chain: Chain, *records: tuple[int, str, int]) -> str:
    """What the column shows after checks up to an increment, of the chain of an operation, this many minutes ago."""
    checks = NewestChecks()
    for increment, operation, minutes in records:
        at = Time.of(NOW - timedelta(minutes=minutes))
        read = structs.replace(read_times(at), last_operation=operation)
        checks.add(EndedCheck("op", at, CheckedPoint("daily", increment, "valid", full=False, read=read)))
    table = lines_of(listing_of(chain, checks), NOW)[0]
    assert isinstance(table, FittingTable)
    title, line, *_ = table.lines(None)
    return line[title.index("reread") : title.index("comment")].strip()


def test_a_check_of_an_earlier_increment_does_not_hide_what_was_read_before() -> None:
    chain = commented(*["x"] * 5)
    everything, earlier = (4, "op-4", 20), (2, "op-2", 10)
    assert reread_text(chain, everything) == "20 min ago"
    assert reread_text(chain, everything, earlier) == "20 min ago"
    assert reread_text(chain, earlier) == "10 min ago, up to increment 2"
    assert reread_text(chain, earlier, (3, "op-3", 30)) == "30 min ago, up to increment 3"
    # Of two that reach as far, the newest reading; whichever ended last.
    assert reread_text(chain, (4, "op-4", 5), everything) == "5 min ago"
    # The snapshot of this name had another chain before.
    assert reread_text(chain, earlier, (4, "op-of-another-chain", 5)) == "10 min ago, up to increment 2"
    assert reread_text(chain, (9, "op-9", 5)) == ""


@pytest.mark.parametrize(
    ("comment", "cell"),
    [
        ('a "quoted", comment', 'a "quoted", comment'),
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ('=HYPERLINK("http://x","y")', '\'=HYPERLINK("http://x","y")'),
        ("a = b", "a = b"),
        ("two\nlines\r\n", "two\\nlines\\r\\n"),
        ("\t=1", "\\t=1"),
        ("\x1b[2J", "\\x1b[2J"),
        ("Grüße", "Grüße"),
    ],
)
def test_a_comment_in_csv_is_no_formula_and_moves_no_cursor(comment: str, cell: str) -> None:
    _, row = csv.DictReader(io.StringIO(as_csv(listing_of(commented("", comment))), newline=""))
    assert row["comment"] == cell


def test_csv_has_a_header_and_is_as_rfc_4180_has_it() -> None:
    chain = commented('a "b", c', "d")
    chain = Chain(structs.replace(chain.full, terminal=True), chain.increments)
    text = as_csv(listing_of(chain))
    # Every line ends with CRLF; a cell with a comma or a quote is quoted, and its quotes are doubled.
    assert text.endswith("\r\n")
    header, first, second = text.removesuffix("\r\n").split("\r\n")
    assert header == ",".join(COLUMNS)
    assert first.endswith(',"a ""b"", c",,,,,')
    assert second.endswith(",d,,,,,")
    read = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [(row["snapshot"], row["increment"], row["terminal"]) for row in read] == [
        ("daily", "0", "true"), ("daily", "1", "false"),
    ]  # fmt: skip
    # A number stays one, and what is not known is empty.
    assert (read[0]["bytes"], read[0]["checked_at"], read[0]["baseline_nodes"]) == ("20", "", "a, b")


def test_a_snapshot_that_can_not_be_read_has_a_row_with_its_problem() -> None:
    listing = Listing((Entry("lost", None, "its commit is gone"),), RetainedAnswers((), {}))
    (row,) = flat_rows(listing)
    assert {name: value for name, value in row.items() if value is not None} == {
        "snapshot": "lost", "state": "broken", "problem": "its commit is gone",
    }  # fmt: skip
    (cells,) = csv.DictReader(io.StringIO(as_csv(listing), newline=""))
    assert (cells["snapshot"], cells["increment"], cells["problem"]) == ("lost", "", "its commit is gone")
    *_, line = flat_table([row], NOW).lines(None)
    assert line.split() == ["lost", "broken", *["its", "commit", "is", "gone"]]


def test_columns_of_the_text_stand_below_their_titles() -> None:
    rows: list[dict[str, Any]] = list(flat_rows(listing_of(commented("", "b"))))
    title, *lines = flat_table(rows, NOW).lines(None)
    at = title.index("cut made")
    assert [line[at : at + 20] for line in lines] == ["2026-11-20 10:00:00Z", "2026-11-20 10:01:00Z"]
    assert [line[: title.index("increment") + len("increment")].split()[-1] for line in lines] == ["0", "1"]


def test_the_newest_increments_come_first_and_those_left_out_are_counted() -> None:
    listing = listing_of(commented(*map(str, range(7))))
    table, hint = lines_of(listing, NOW, None, 3)
    assert isinstance(table, FittingTable)
    assert [row[1] for row in table.rows] == ["6", "5", "4", "…", "full"]
    assert [row[0] for row in table.rows] == ["daily", "", "", "", ""]
    assert [row[2] for row in table.rows][3] == "3 more"
    assert hint == "all increments: snapshot list daily --all"
    (table,) = lines_of(listing, NOW, "daily", None)
    assert isinstance(table, FittingTable)
    assert [row[1] for row in table.rows] == ["6", "5", "4", "3", "2", "1", "full"]
    document = entry_document(listing.entries[0], first=5)
    assert ([one["number"] for one in document["increments"]], document["increments_left_out"]) == ([5, 6], 4)
    with pytest.raises(SnapshotMissingError):
        lines_of(listing, NOW, "other")
