from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from cutline.check.report import (
    CheckReport,
    Compared,
    Conflict,
    Doubt,
    Findings,
    RestsOn,
    Skipped,
    SnapshotReport,
    UncomparedPoints,
)
from cutline.check.verify import CheckRequest
from cutline.cli.commands.check import (
    CONFLICTS_SHOWN_MAX,
    REPAIRABLE,
    add_problems,
    checked_points,
    lines_of,
    volumes_of,
)
from cutline.cli.output.failure import CONFLICTS, DONE, INCONCLUSIVE
from cutline.cli.output.renewed import gap_texts
from cutline.fleet.record import Time
from cutline.restore.drill.restorable import RestorableReport, RestoreProblem
from cutline.snapshots.records.chain import RenewalGap
from cutline.storage.errors import report_of
from cutline.wal.segments.damage import ObjectDamagedError

SOMETHING = Compared(objects=1)
CONFLICT = Conflict("digest", "its contents differ from those that were committed", object="key", node="s1")
DOUBT = Doubt("sequence", "it went back", node="s1")
SKIPPED = Skipped("rows of shard s1", "no backup copy to compare with")


ONE_COPY = Skipped("rows of shard s1", "no backup copy to compare with", is_one_copy=True)
ABSENT = Skipped("the copy of s1-b1", "increment 3 and later leave it out: it was away", is_absent=True)


def valid_report() -> SnapshotReport:
    return SnapshotReport("a", 1, Compared(objects=1))


@pytest.mark.parametrize(("report", "result"), [
    (valid_report(), "valid"),
    (SnapshotReport("a", 0), "inconclusive"),
    (SnapshotReport("a", 0, Compared(rows=5)), "inconclusive"),
    (SnapshotReport("a", 0, SOMETHING, skipped=[SKIPPED]), "inconclusive"),
    (SnapshotReport("a", 0, SOMETHING, skipped=[ONE_COPY]), "inconclusive"),
    (SnapshotReport("a", 0, SOMETHING, skipped=[ONE_COPY], allows_one_copy=True), "one-copy"),
    (SnapshotReport("a", 0, SOMETHING, skipped=[ONE_COPY, SKIPPED], allows_one_copy=True), "inconclusive"),
    (SnapshotReport("a", 0, SOMETHING, skipped=[ABSENT], allows_one_copy=True), "inconclusive"),
    (SnapshotReport("a", 0, SOMETHING, skipped=[ONE_COPY, ABSENT], allows_one_copy=True), "inconclusive"),
    (SnapshotReport("a", 0, SOMETHING, allows_one_copy=True), "valid"),
    (SnapshotReport("a", 0, SOMETHING, doubts=[DOUBT]), "valid"),
    (SnapshotReport("a", 0, SOMETHING, [ONE_COPY], [CONFLICT], allows_one_copy=True), "conflicts"),
    (SnapshotReport("a", 0, SOMETHING, conflicts=[CONFLICT]), "conflicts"),
    (SnapshotReport("a", 0, conflicts=[CONFLICT], skipped=[SKIPPED]), "conflicts"),
])  # fmt: skip
def test_a_snapshot_is_valid_only_if_everything_was_compared(report: SnapshotReport, result: str) -> None:
    assert report.result == result


@pytest.mark.parametrize(("reports", "code"), [
    ((), INCONCLUSIVE),
    ((valid_report(), valid_report()), DONE),
    ((valid_report(), SnapshotReport("b", 0)), INCONCLUSIVE),
    ((valid_report(), SnapshotReport("b", 0, SOMETHING, [ONE_COPY], allows_one_copy=True)), DONE),
    ((SnapshotReport("a", 0), SnapshotReport("b", 0, SOMETHING, [ONE_COPY], allows_one_copy=True)), INCONCLUSIVE),
    ((valid_report(), SnapshotReport("b", 0, conflicts=[CONFLICT]), SnapshotReport("c", 0)), CONFLICTS),
])  # fmt: skip
def test_a_check_is_as_good_as_its_worst_snapshot(reports: tuple[SnapshotReport, ...], code: int) -> None:
    assert CheckReport(reports, 1.0).exit_code == code


def test_the_json_document_has_the_form_that_scripts_rely_on() -> None:
    compared = Compared(objects=1, bytes=2, rows=3, changes=4, partitions=5, transactions=6)
    snapshot = SnapshotReport("a", 2, compared, [SKIPPED], [CONFLICT], ["public.log"], doubts=[DOUBT])
    report = CheckReport((snapshot,), 0.12345)
    assert json.loads(json.dumps(report.to_json())) == {
        "schema": "cutline/check/1",
        "result": "conflicts",
        "rests_on_records": False,
        "seconds": 0.123,
        "snapshots": [{
            "name": "a", "increment": 2, "exact_at": None, "result": "conflicts",
            "compared": {
                "objects": 1, "bytes": 2, "rows": 3, "changes": 4, "partitions": 5, "transactions": 6,
                "rows_read_once": 0,
            },
            "append_only": ["public.log"],
            "large_objects": 0,
            "unknown_participants": None,
            "foreign_participants": [],
            "rests_on": None,
            "unused_records": None,
            "warned": [],
            "skipped": [
                {"what": "rows of shard s1", "why": "no backup copy to compare with", "is_one_copy": False,
                 "is_absent": False}
            ],
            "uncompared_points": [],
            "gaps": [],
            "conflicts": [{
                "kind": "digest", "node": "s1", "other_node": None, "group": None, "partition": None,
                "object": "key", "global_id": None, "detail": "its contents differ from those that were committed",
                "rows": [], "rows_unnamed": "",
            }],
            "doubts": [{
                "kind": "sequence", "detail": "it went back", "node": "s1", "group": None, "object": None,
            }],
        }],
        "open_operations": [],
    }  # fmt: skip


def test_a_doubt_is_shown_as_a_warning_which_quiet_commands_show_too() -> None:
    of_table = Doubt("older-value", "it is another", group="public.t", object="key")
    of_object = Doubt("time", "it is early", object="snapshots/a/snapshot.json")
    doubts = [DOUBT, of_table, of_object]
    lines = lines_of(CheckReport((SnapshotReport("a", 2, SOMETHING, doubts=doubts),), 1.0))
    assert [line for line in lines if line.startswith("warning: ")] == [
        "warning: a: sequence (s1): it went back",
        "warning: a: older-value (public.t): it is another",
        "warning: a: time (snapshots/a/snapshot.json): it is early",
    ]
    many = SnapshotReport("a", 2, SOMETHING, doubts=[DOUBT] * (CONFLICTS_SHOWN_MAX + 3))
    assert "warning: a: 3 more doubts; --json lists all of them" in lines_of(CheckReport((many,), 1.0))


def test_a_gap_is_a_warning_of_its_own_and_does_not_change_the_result() -> None:
    gaps = tuple(RenewalGap(number, "s1", "its slot is lost") for number in range(1, CONFLICTS_SHOWN_MAX + 3))
    report = CheckReport((SnapshotReport("a", 30, SOMETHING, gaps=gaps),), 1.0)
    assert report.result == "valid"
    lines = [line for line in lines_of(report) if line.startswith("warning: ")]
    assert lines[0] == (
        f"warning: a: no time between increment {CONFLICTS_SHOWN_MAX + 1} and increment {CONFLICTS_SHOWN_MAX + 2}"
        " can be restored: primary s1 was copied again: its slot is lost"
    )
    assert lines[CONFLICTS_SHOWN_MAX:] == ["warning: a: 2 earlier gaps; --json lists all of them"]


def test_quiet_commands_name_only_the_gaps_that_no_earlier_check_has_named() -> None:
    gaps = tuple(RenewalGap(number, "s1", "its slot is lost") for number in (2, 5, 6))
    report = CheckReport((SnapshotReport("a", 7, SOMETHING, gaps=gaps, gaps_named_to=5),), 1.0)
    named = [line.partition(" can be")[0] for line in lines_of(report) if "no time between" in line]
    assert named == [
        "warning: a: no time between increment 5 and increment 6",
        "a: no time between increment 4 and increment 5",
        "a: no time between increment 1 and increment 2",
    ]


def test_a_gap_of_several_shards_is_one_line_with_each_reason_once() -> None:
    gaps = (
        RenewalGap(3, "s1", "the publication was altered"),
        RenewalGap(3, "s2", "its WAL was lost", 1, "0/50000D8"),
        RenewalGap(3, "s3", "the publication was altered"),
        RenewalGap(3, "s4", "its WAL was lost", 1, "0/60000D8"),
        RenewalGap(4, "s1", "its slot is lost"),
    )
    assert gap_texts(gaps) == [
        "no time between increment 2 and increment 3 can be restored: primaries s1, s3 were copied again: the"
        " publication was altered; primaries s2, s4 were copied again: its WAL was lost; increments 1 to 2 may hold"
        " transactions of s2, s4 that are lost",
        "no time between increment 3 and increment 4 can be restored: primary s1 was copied again: its slot is lost",
    ]


@pytest.mark.parametrize(("since", "after", "text"), [
    (None, None, ""),
    (6, "0/50000D8", "; increment 6 may hold transactions of s1 that are lost"),
    (2, "0/50000D8", "; increments 2 to 6 may hold transactions of s1 that are lost"),
    (0, "0/0", "; the full snapshot to increment 6 may hold transactions of s1 that are lost: it is not known up to"
     " where its server at increment 7 has their WAL"),
])  # fmt: skip
def test_a_gap_names_the_restore_points_that_may_hold_lost_transactions(
    since: int | None, after: str | None, text: str
) -> None:
    gap = RenewalGap(7, "s1", "its WAL was lost", since, after)
    report = CheckReport((SnapshotReport("a", 7, SOMETHING, gaps=(gap,)),), 1.0)
    (line,) = (line for line in lines_of(report) if line.startswith("warning: "))
    assert line.endswith(f"primary s1 was copied again: its WAL was lost{text}")


@pytest.mark.parametrize(("copies", "rows"), [
    ((), "60 base rows, 4 changes"),
    ((1,), "60 base rows, 4 changes"),
    ((2,), "60 base rows and 4 changes in 2 copies"),
    ((1, 2), "60 base rows and 4 changes in all copies"),
])  # fmt: skip
def test_the_text_says_in_how_many_copies_rows_were_counted(copies: tuple[int, ...], rows: str) -> None:
    compared = Compared(objects=1, bytes=2, rows=60, changes=4, partitions=5, transactions=6)
    shards = {f"s{number}": count for number, count in enumerate(copies)}
    lines = lines_of(CheckReport((SnapshotReport("a", 2, compared, shards=shards),), 1.0))
    assert lines[1] == f"  compared 1 object (2 B), {rows}, 5 partitions, 6 global transactions"


def test_rows_that_were_read_once_for_all_copies_are_not_said_to_be_compared() -> None:
    compared = Compared(objects=1, bytes=2, rows=60, changes=4, rows_read_once=1000)
    report = SnapshotReport("a", 2, compared, shards={"s1": 2, "s2": 2})
    lines = lines_of(CheckReport((report,), 1.0))
    assert lines[1].startswith("  compared 1 object (2 B), 60 base rows and 4 changes in 2 copies, ")
    assert lines[2] == "  read back, but not compared, because all copies share one base copy: 1,000 base rows"
    assert report.to_json()["compared"]["rows_read_once"] == 1000
    # The work of a check, for `history`, has both.
    assert volumes_of(CheckReport((report,), 1.0))["rows"] == 1060


def test_a_check_of_names_and_sizes_says_only_that() -> None:
    report = SnapshotReport("a", 2, Compared(objects=30), [SKIPPED], shards={"s1": 2, "s2": 2})
    assert lines_of(CheckReport((report,), 1.0))[1] == "  compared 30 objects, by name and size"


RECORD = RestsOn(
    operation="o1", ended_at=Time("2026-11-20T00:00:00.000Z"), compared_by="o0",
    compared_at=Time("2026-11-19T00:00:00.000Z"), oldest_read_at=Time("2026-11-19T00:00:00.000Z"),
    reread_seconds=86400.0, objects=3, bytes=5, reread_objects=1, reread_bytes=2, left_objects=0, left_bytes=0,
)  # fmt: skip


def test_objects_that_rest_on_records_are_mentioned_only_if_there_are_any() -> None:
    for record, count in ((RECORD, 1), (replace(RECORD, objects=0, bytes=0), 0)):
        lines = lines_of(CheckReport((SnapshotReport("a", 2, SOMETHING, rests_on=record),), 1.0))
        assert sum("by records: " in line for line in lines) == count
        assert any("record: check o1" in line for line in lines)


MISSING = Conflict("missing", "it is not in the store", object="key", node="s1")
HASHES = Conflict("row-hash", "20,000 rows on both", node="s1", other_node="s1-b1", group="public.t", partition=0)


@pytest.mark.parametrize(("conflicts", "hints"), [
    ([CONFLICT], ["snapshot repair a"]),
    ([Conflict("commit", "it is not in the store", object="key")], ["snapshot repair a"]),
    ([HASHES], ["snapshot check a --rows 20", "snapshot check --live a"]),
    ([Conflict("events", "2 events, 3 events", node="s1", other_node="s1-b1")], ["snapshot check --live a"]),
    # The damage explains that changes differ.
    ([MISSING, Conflict("changes", "2 changes, 3", node="s1", other_node="s1-b1")], ["snapshot repair a"]),
    ([MISSING, replace(HASHES, node="s2", other_node="s2-b1")],
     ["snapshot check a --rows 20", "snapshot repair a", "snapshot check --live a"]),
    ([Conflict("cut", "it does not follow", node="s1")], []),
    ([], []),
])  # fmt: skip
def test_the_hints_fit_the_conflicts_and_name_the_snapshot(conflicts: list[Conflict], hints: list[str]) -> None:
    lines = lines_of(CheckReport((SnapshotReport("a", 2, SOMETHING, conflicts=conflicts), valid_report()), 1.0))
    commands = [line.rpartition(": ")[2] for line in lines if ": snapshot " in line]
    # What a repair may replace needs no new snapshot.
    is_repairable = all(one.kind in REPAIRABLE for one in conflicts)
    assert commands == [*hints, *["snapshot create NAME"] * (not is_repairable)]


@pytest.mark.parametrize(("skipped", "is_allowed", "is_named"), [
    ([ONE_COPY], False, True), ([ONE_COPY, SKIPPED], False, True), ([SKIPPED], False, False),
    ([ONE_COPY, SKIPPED], True, False), ([ONE_COPY], True, False), ([ONE_COPY, ABSENT], False, False),
])  # fmt: skip
def test_an_inconclusive_check_says_how_to_allow_one_copy(
    skipped: list[Skipped], *, is_allowed: bool, is_named: bool
) -> None:
    report = SnapshotReport("a", 0, SOMETHING, skipped=skipped, allows_one_copy=is_allowed)
    text = "\n".join(lines_of(CheckReport((report,), 1.0)))
    assert ('[check] allow = ["one-copy"]' in text) == is_named
    assert ("the next increment continues its copy" in text) == (ABSENT in skipped)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_parts_that_fleet_toml_allows_are_named_after_those_that_decide(*, is_allowed: bool) -> None:
    first, last = (ABSENT, ONE_COPY) if is_allowed else (ONE_COPY, ABSENT)
    report = SnapshotReport("a", 0, SOMETHING, skipped=[ONE_COPY, ABSENT], allows_one_copy=is_allowed)
    assert report.result == "inconclusive"
    assert [part["what"] for part in report.to_json()["skipped"]] == [first.what, last.what]
    assert [part.what for part in report.figures.examples] == [first.what, last.what]
    named = [line for line in lines_of(CheckReport((report,), 1.0)) if "skipped: " in line]
    assert [first.what in named[0], last.what in named[1]] == [True, True]


def test_what_earlier_restore_points_lack_is_named_and_changes_nothing() -> None:
    away = "it was left out: it is away"
    points = (
        UncomparedPoints(0, 31, "rows of shard s3", "no backup copy to compare with"),
        UncomparedPoints(3, 4, "the copy of s1-b1", away),
        UncomparedPoints(3, 4, "the copy of s2-b1", away),
        UncomparedPoints(0, 0, "rows of shard s4", "no backup copy to compare with"),
    )
    report = CheckReport((SnapshotReport("a", 32, SOMETHING, uncompared_points=points), valid_report()), 1.0)
    assert (report.exit_code, report.result) == (DONE, "valid")
    lines = lines_of(report)
    assert [line.strip() for line in lines if line.startswith("  not compared at")] == [
        "not compared at the full snapshot to increment 31: rows of shard s3 (no backup copy to compare with)",
        f"not compared at increments 3 to 4: the copy of s1-b1, the copy of s2-b1 ({away})",
        "not compared at the full snapshot: rows of shard s4 (no backup copy to compare with)",
    ]
    assert [line for line in lines if line.endswith("snapshot merge a --drop-earlier")]
    document = report.to_json()["snapshots"][0]
    assert document["uncompared_points"][1] == {
        "first": 3,
        "last": 4,
        "what": "the copy of s1-b1",
        "why": away,
        "is_one_copy": False,
    }
    assert "--drop-earlier" not in "\n".join(lines_of(CheckReport((valid_report(),), 1.0)))


def test_a_hint_about_several_snapshots_names_none_of_them() -> None:
    reports = tuple(SnapshotReport(name, 2, SOMETHING, conflicts=[CONFLICT]) for name in ("a", "b"))
    assert sum("snapshot repair NAME" in line for line in lines_of(CheckReport(reports, 1.0))) == 1


class CountedConflicts(list[Conflict]):
    """Counts the conflicts that are looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Conflict]:
        self.looked_at += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.looked_at += len(found) if isinstance(at, slice) else 1
        return found


def test_a_damaged_object_is_reported_once_without_a_search_of_all_conflicts() -> None:
    conflicts = CountedConflicts([Conflict("archive", "a transaction is open", node="s1", object="part-7")])
    findings = Findings(SnapshotReport("a", 0, conflicts=conflicts))
    for number in (*range(100), 5, 7):
        damage = ObjectDamagedError(key=f"part-{number}", kind="missing", node=f"s{number}", detail="it is gone")
        findings.damage(report_of(damage))
        # Other passes add conflicts to the report itself.
        findings.report.conflicts.append(Conflict("cut", "another position"))
    keys = [conflict.object for conflict in conflicts if conflict.object]
    assert keys == ["part-7", *(f"part-{number}" for number in range(100) if number != 7)]
    assert findings.damaged == {f"s{number}" for number in range(100)}
    # Each of the about 200 conflicts once, and all of them in the line above.
    assert conflicts.looked_at < 3 * len(conflicts)


def test_the_record_of_a_check_has_what_it_did_not_compare_and_whether_a_restore_could_load_the_rows() -> None:
    away = UncomparedPoints(3, 4, "the copy of s1-b1", "it was left out")
    report = SnapshotReport("a", 9, SOMETHING, uncompared_points=(away,))
    (plain,) = checked_points(CheckReport((report,), 1.0), CheckRequest("a"))
    assert (plain.uncompared, plain.restorable, plain.result) == (((3, 4),), UNSET, "valid")
    (built,) = checked_points(CheckReport((report,), 1.0), CheckRequest("a"), RestorableReport())
    assert built.restorable is True
    refused = RestorableReport(problems=[RestoreProblem("s1", "public.a", "two rows have the key 1")])
    add_problems(report, refused)
    (record,) = checked_points(CheckReport((report,), 1.0), CheckRequest("a"), refused)
    assert (record.restorable, record.result) == (False, "conflicts")
    (without,) = checked_points(CheckReport((valid_report(),), 1.0), CheckRequest("a"))
    assert without.uncompared is UNSET
