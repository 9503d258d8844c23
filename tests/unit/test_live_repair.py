"""The script for an operator after a check of running databases, the result of the check, and its options."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.check.live.indexes import IndexOf, OtherDamage, other_damage
from cutline.check.live.repair_script import identifier, repair_script
from cutline.check.live.report import (
    INDEX,
    STANDBY_ROWS,
    UNREADABLE,
    CutCompared,
    LiveCompared,
    LiveConflict,
    LiveCopy,
    LiveReport,
    LiveRow,
    LiveVersion,
    RowRepair,
    ShardReport,
    UnprovenRows,
    pages_text,
)
from cutline.check.live.run import other_database
from cutline.cli.commands.check_live import live_lines, script_mode
from cutline.cli.output.junit_live import junit_of_live
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Column, Group
from tests.commands.in_process import run_here

COLUMNS = (Column("id", "integer", 23, -1, 0), Column("name", "text", 25, -1, 1), Column("n", "integer", 23, -1, 2))
KEYED = Group(1, "public", "t", "default", 1, COLUMNS)
FULL = Group(1, "public", "t", "full", 0, COLUMNS)


IDENTITY = NodeIdentity("a", None, "7300000000000000001", 2, 16384, "shop", 170000, "UTF8", "C", "C", in_recovery=False)


def report_of(*conflicts: LiveConflict, repairs: tuple[RowRepair, ...] = ()) -> LiveReport:
    shard = ShardReport("a", ("b",), compared=LiveCompared(1, 0, 100, 8192), cut=CutCompared(1, 90, 5, 3))
    report = LiveReport("daily", 2, [shard], list(conflicts), repairs=list(repairs))
    report.identities |= {"a": IDENTITY, "b": structs.replace(IDENTITY, node="b", backup_of="a", in_recovery=True)}
    report.quoted["public.t"] = '"public"."t"'
    return report


def statements(report: LiveReport) -> list[str]:
    """Return the lines of the sections that psql would run in the right database if the operator allowed them all."""
    lines = repair_script(report).splitlines()
    found: list[str] = []
    is_open = False
    for line in lines:
        if line.startswith("\\if") or line.startswith("\\else"):
            is_open = line.startswith("\\if")
        elif is_open and not line.startswith(("--", "\\")):
            found.append(line)
    return found


def version(line: bytes, place: str = "(0,7)", file: int | None = 500) -> LiveVersion:
    return LiveVersion(place, 900, file, line)


def changes_of(*repairs: RowRepair) -> list[str]:
    """Return the statements about rows, without the settings and the end."""
    found = statements(report_of(repairs=repairs))
    assert found[0].startswith("SET client_encoding = 'UTF8'; SET standard_conforming_strings = 'on';")
    assert found[-1] == "ROLLBACK;"
    return found[1:-1]


AT = "ctid = '(0,7)' AND xmin = '900' AND pg_catalog.pg_relation_filenode(tableoid) = 500"


def test_a_row_gets_the_contents_of_the_cut_unless_it_has_been_written_since() -> None:
    repair = RowRepair("a", KEYED, 1, 1, b"7\tit's\t5\n", (version(b"7\tO'Neil\\t\\\\\t\\N\n"),))
    assert changes_of(repair) == [
        f'UPDATE ONLY "public"."t" SET "name" = \'it\'\'s\', "n" = \'5\' WHERE "id" = \'7\' AND {AT};'
    ]
    assert "name is now O'Neil" in repair_script(report_of(repairs=(repair,)))
    # Nothing is left to do for a row that is equal by now.
    assert changes_of(RowRepair("a", KEYED, 1, 1, b"7\ta\t5\n", (version(b"7\ta\t5\n"),))) == []


def test_values_are_read_under_the_settings_under_which_they_were_printed() -> None:
    script = repair_script(report_of(repairs=(RowRepair("a", KEYED, 1, 0, b"7\ta\t\\N\n"),)))
    for text in ("datestyle = 'ISO, YMD'", "intervalstyle = 'postgres'", "timezone = 'UTC'", "lc_monetary = 'C'",
                 "xmloption = 'content'", "array_nulls = 'on'", "row_security = 'off'"):  # fmt: skip
        assert f" SET {text};" in script
    # Only a superuser may keep triggers from running, so the operator decides.
    assert "\n-- SET LOCAL session_replication_role = replica;\n" in script


def test_rows_that_one_side_lacks_are_inserted_and_deleted() -> None:
    lost = RowRepair("a", KEYED, 1, 0, b"7\ta\t\\N\n")
    unknown = RowRepair("a", KEYED, 0, 1, None, (version(b"8\tb\t1\n"),))
    assert changes_of(lost, unknown) == [
        'INSERT INTO "public"."t" ("id", "name", "n") OVERRIDING SYSTEM VALUE VALUES (\'7\', \'a\', NULL);',
        f'DELETE FROM ONLY "public"."t" WHERE "id" = \'8\' AND {AT};',
    ]


def test_a_row_is_not_deleted_because_its_line_at_the_cut_is_not_known() -> None:
    for why in ("the row is too long for this script", "object x is damaged"):
        repair = RowRepair("a", KEYED, 1, 1, None, (version(b"7\tb\t1\n"),), why)
        assert changes_of(repair) == []
        assert f"public.t 7: the snapshot's row is not known: {why}" in repair_script(report_of(repairs=(repair,)))


def test_a_second_row_under_a_key_that_is_right_otherwise_is_deleted() -> None:
    assert changes_of(RowRepair("a", KEYED, 0, 1, None, (version(b"7\tfalse\t1\n"),))) == [
        f'DELETE FROM ONLY "public"."t" WHERE "id" = \'7\' AND {AT};'
    ]
    # Of two false rows, the first gets the cut's contents.
    two = (version(b"7\tb\t1\n"), version(b"7\tc\t1\n", "(0,8)"))
    deleted, updated = changes_of(RowRepair("a", KEYED, 1, 2, b"7\ta\t1\n", two))
    assert (deleted[:6], "(0,8)" in deleted, updated[:6], "(0,7)" in updated) == ("DELETE", True, "UPDATE", True)


def test_lines_without_a_key_become_as_many_as_at_the_cut() -> None:
    line = b"7\ta\t1\n"
    (inserted,) = changes_of(RowRepair("a", FULL, 1_000_000, 0, line))
    assert inserted == (
        'INSERT INTO "public"."t" ("id", "name", "n") OVERRIDING SYSTEM VALUE'
        " SELECT '7', 'a', '1' FROM pg_catalog.generate_series(1, 1000000);"
    )
    twice = (version(line), version(line, "(0,8)"))
    assert changes_of(RowRepair("a", FULL, 0, 2, None, twice)) == [
        f'DELETE FROM ONLY "public"."t" WHERE {AT};', f'DELETE FROM ONLY "public"."t" WHERE {AT.replace("7)", "8)")};'
    ]  # fmt: skip
    # Only some places are known: the others are for the next script.
    repair = RowRepair("a", FULL, 0, 5, None, twice)
    assert len(changes_of(repair)) == 2
    assert "3 rows more that the snapshot lacks: repeat the check" in repair_script(report_of(repairs=(repair,)))


def test_a_row_whose_place_is_not_known_gets_no_statement() -> None:
    repair = RowRepair("a", KEYED, 1, 1, b"7\ta\t1\n")
    assert changes_of(repair) == []
    script = repair_script(report_of(repairs=(repair,)))
    assert "public.t 7: the database has 1 row that the snapshot lacks, but their places are not known" in script
    assert "the snapshot has 7" in script
    assert changes_of(RowRepair("a", FULL, 0, 2, None)) == []


def test_tables_without_columns_identities_and_types_of_extensions() -> None:
    empty = Group(1, "public", "t", "full", 0, ())
    assert changes_of(RowRepair("a", empty, 1, 0, b"\n")) == ['INSERT INTO "public"."t" DEFAULT VALUES;']
    assert changes_of(RowRepair("a", empty, 2, 0, b"\n")) == [
        'INSERT INTO "public"."t" SELECT FROM pg_catalog.generate_series(1, 2);'
    ]
    assert changes_of(RowRepair("a", empty, 0, 1, None, (version(b"\n", file=None),))) == [
        "DELETE FROM ONLY \"public\".\"t\" WHERE ctid = '(0,7)' AND xmin = '900';"
    ]
    # PostgreSQL refuses to update a column that is GENERATED ALWAYS AS IDENTITY.
    fixed = RowRepair("a", KEYED, 1, 1, b"7\ta\t1\n", (version(b"7\ta\t2\n"),), fixed=frozenset({"n", "id"}))
    found = changes_of(fixed)
    assert found[0] == 'ALTER TABLE "public"."t" ALTER COLUMN "n" SET GENERATED BY DEFAULT;'
    assert found[1].startswith('UPDATE ONLY "public"."t" SET "n" = \'1\' WHERE')
    assert found[2:] == ['ALTER TABLE "public"."t" ALTER COLUMN "n" SET GENERATED ALWAYS;']
    # The operators of a key's type may be in any schema: ctid, xmin and file say enough.
    columns = (Column("id", "ext.label", 70000, -1, 0), *COLUMNS[1:])
    other = Group(1, "public", "t", "default", 1, columns)
    assert changes_of(RowRepair("a", other, 0, 1, None, (version(b"7\ta\t1\n"),))) == [
        f'DELETE FROM ONLY "public"."t" WHERE {AT};'
    ]


def test_the_script_says_of_which_tables_nobody_knows_what_was_written() -> None:
    rows = [RowRepair("a", KEYED, 1, 0, line, unproven="no slot") for line in (b"7\ta\t1\n", b"8\ta\t1\n")]
    script = repair_script(report_of(repairs=(*rows,)))
    assert script.count("-- public.t: the application may have written the following rows since") == 1
    assert "the application may have written" not in repair_script(report_of(repairs=(replace(rows[0], unproven=""),)))


def test_a_new_script_is_its_users_only(tmp_path: Path) -> None:
    script = tmp_path / "repair.sql"
    assert script_mode(script) == 0o600
    script.touch()
    assert script_mode(script) is None


def test_a_name_in_a_script_is_ascii_and_can_not_end_its_comment() -> None:
    assert identifier('a"b') == '"a""b"'
    assert identifier('é"\\') == 'U&"\\+0000E9""\\\\"'
    evil = LiveConflict(INDEX, "index x\nDROP TABLE t;", "a", group="public.t", index='"public"."x"')
    assert statements(report_of(evil)) == ['REINDEX INDEX CONCURRENTLY "public"."x";']
    odd = LiveConflict(INDEX, "x", "a", group="public.t", index='"é"."a""."')
    assert statements(report_of(odd)) == ['REINDEX INDEX CONCURRENTLY U&"\\+0000E9"."a"".";']


def test_a_section_is_for_one_database_and_runs_only_if_the_operator_allows_it() -> None:
    conflict = LiveConflict(INDEX, "index x", "b", group="public.t", index='"public"."x"')
    section = repair_script(report_of(conflict)).split("\n\n")[1].splitlines()
    assert section == [
        "-- section 1, for node a, database shop: rebuilds an index, also on the standbys",
        "-- on b: index x",
        r"\set cutline_here false",
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN false ELSE",
        "    (SELECT system_identifier = 7300000000000000001 FROM pg_catalog.pg_control_system())",
        "    AND (SELECT oid = 16384 FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())",
        "    AND pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8) = '00000002'",
        r"    END AS cutline_here \gset",
        r"\set cutline_apply no",
        r"\if :cutline_here",
        r"\if :cutline_apply",
        'REINDEX INDEX CONCURRENTLY "public"."x";',
        r"\else",
        r"\echo 'section 1, for node a: cutline_apply is no, so nothing was done'",
        r"\endif",
        r"\else",
        r"\echo 'section 1, for node a: this is another server or database, so nothing was done'",
        r"\endif",
        "-- If a collation has changed, see also: ALTER COLLATION … REFRESH VERSION",
    ]
    # The primary rebuilds the index on its standbys, so several nodes need one section.
    both = [replace(conflict, node=node) for node in ("a", "b")]
    assert len(statements(report_of(*both))) == 1


def test_a_standby_gets_its_pages_from_its_primary() -> None:
    conflict = LiveConflict(STANDBY_ROWS, "1 row is missing", "a", "b", "public.t", pages=(3,))
    found = statements(report_of(conflict))
    assert found[0] == "CHECKPOINT;"
    assert """FROM ONLY "public"."t" WHERE ctid >= '(3,0)' AND ctid < '(4,0)'""" in found[1]
    assert "FOR KEY SHARE" in found[1]
    # The same for a page that the standby can't read; a primary's page is beyond SQL.
    unreadable = LiveConflict(UNREADABLE, "page 3 can't be read", "b", group="public.t", pages=(3,))
    assert statements(report_of(unreadable)) == found
    of_primary = LiveConflict(UNREADABLE, "page 3 can't be read", "a", group="public.t", pages=(3,))
    assert statements(report_of(of_primary)) == []
    assert "Nothing to repair was found" in repair_script(report_of())


def test_the_result_is_valid_only_if_everything_was_compared() -> None:
    report = report_of()
    assert (report.result, report.exit_code) == ("valid", 0)
    report.skip("rows of shard c", "it has no standby", is_one_copy=True)
    report.skip("rows of shard c", "it has no standby", is_one_copy=True)
    assert (report.result, report.exit_code, len(report.skipped)) == ("inconclusive", 4, 1)
    report.allows_one_copy = True
    assert (report.result, report.exit_code) == ("one-copy", 0)
    report.conflicts.append(LiveConflict(INDEX, "x", "a"))
    assert (report.result, report.exit_code) == ("conflicts", 1)
    assert LiveReport(shards=[ShardReport("a", ())]).result == "inconclusive"


def test_a_node_that_can_not_be_reached_has_an_exit_code_unless_something_is_wrong() -> None:
    report = report_of()
    report.unreachable["c"] = "connection refused"
    assert (report.result, report.exit_code) == ("inconclusive", 6)
    assert report.to_json()["unreachable"] == [{"node": "c", "why": "connection refused"}]
    lines = live_lines(report)
    assert "  unreachable: c (connection refused)" in lines
    assert lines[-2].endswith("then repeat the check")
    (suite,) = ElementTree.fromstring(junit_of_live(report))
    assert [case.get("name") for case in suite if case.find("error") is not None] == ["node c"]
    assert suite[1].get("name") == "shard a: rows compared with b"
    assert (suite.get("errors"), suite.get("skipped")) == ("1", "0")
    report.conflicts.append(LiveConflict(INDEX, "x", "a"))
    assert (report.result, report.exit_code) == ("conflicts", 1)
    # A comparison that lost its node during the check has not passed.
    report.unreachable["b"] = "no answer for 30 s"
    (suite,) = ElementTree.fromstring(junit_of_live(report))
    assert [case.get("name") for case in suite] == ["index: a", "node c", "node b"]


def test_rows_that_prove_nothing_are_shown_as_such_and_not_called_different() -> None:
    row = LiveRow("7", "(0,7)", (LiveCopy("a", "7\tx"), LiveCopy("daily at increment 2", "7\ty")))
    report = report_of()
    report.shards[0].cut = CutCompared(1, 90, 0, unproven=2)
    report.skip("public.t on a", "2 rows differ from the cut, but nobody knows why")
    report.unproven.append(UnprovenRows("a", "public.t", 2, "nobody knows why", (row,)))
    lines = live_lines(report, rows=5)
    assert lines[1].endswith("90 rows equal, 0 written since, 2 not equal, perhaps because they were written since")
    at = lines.index("  unproven: public.t on a: these rows differ from the cut")
    assert lines[at + 1 : at + 4] == ["    row 7 at (0,7):", "      a: 7\tx", "      daily at increment 2: 7\ty"]
    assert report.to_json()["unproven"][0]["rows"][0]["key"] == "7"
    (suite,) = ElementTree.fromstring(junit_of_live(report))
    skipped = suite.find("testcase/skipped")
    assert skipped is not None
    assert (skipped.text or "").startswith("row 7 at (0,7):\n  a: 7\tx")


def test_only_options_that_were_not_given_are_suggested() -> None:
    report = report_of(LiveConflict(STANDBY_ROWS, "1 row is missing", "a", "b", "public.t"))
    script = Path("repair.sql")
    asked = {
        (rows, given): [line for line in live_lines(report, given, rows) if line.startswith("find out")]
        for rows in (0, 5)
        for given in (None, script)
    }
    begin = "find out which side is right before you change anything"
    rows, repairs = "; to see rows: --rows 20", "; to get statements for repairs: --repair-script FILE"
    assert asked == {
        (0, None): [begin + rows + repairs], (5, None): [begin + repairs], (0, script): [begin + rows],
        (5, script): [begin],
    }  # fmt: skip
    index = report_of(LiveConflict(INDEX, "x", "a"))
    assert begin + repairs in live_lines(index)


def test_the_cases_of_a_junit_report_have_different_names_and_a_compared_shard_has_passed() -> None:
    row = LiveRow("7", "(0,7)", (LiveCopy("a", "7\tx"), LiveCopy("b", None)))
    report = report_of(
        LiveConflict(STANDBY_ROWS, "1 row is missing", "a", "b", "public.t", rows=(row,)),
        *(LiveConflict(INDEX, "x", "b", group="public.t", index=f'"public"."{name}"') for name in "xy"),
        *(LiveConflict(UNREADABLE, f"page {page}", "b", group="public.t") for page in (3, 4)),
    )  # fmt: skip
    report.shards.append(ShardReport("c", ("d", "e"), compared=LiveCompared(2, indexes=3), cut=CutCompared(2, 9)))
    report.skip("public.u on a", "it was rewritten during the check")
    (suite,) = ElementTree.fromstring(junit_of_live(report))
    assert [case.get("name") for case in suite] == [
        "standby-rows: a and b public.t", 'index: b public.t "public"."x"', 'index: b public.t "public"."y"',
        "unreadable: b public.t", "unreadable: b public.t (2)", "public.u on a",
        "shard c: rows compared with d, e", "shard c: rows compared with daily at increment 2",
        "shard c: indexes checked",
    ]  # fmt: skip
    failure = suite[0].find("failure")
    assert failure is not None
    assert failure.text == "row 7 at (0,7):\n  a: 7\tx\n  b: no such row"
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "9",
        "5",
        "0",
        "1",
    )


def test_pages_that_can_not_be_read_do_not_count_as_compared() -> None:
    report = report_of()
    report.shards[0].compared = LiveCompared(3, 1, 90, 8192)
    assert live_lines(report)[0] == (
        "shard a: compared 3 tables (in 1 of them, not the pages that can't be read) with b: 90 rows, 8.0 KiB"
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, ""),
        ({"system_identifier": "8"}, "this is another server than at the snapshot (system identifier 8, not 73"),
        ({"timeline": 3}, "the server is on timeline 3, the snapshot on 2: a standby was promoted, or the server was"),
        ({"database_oid": 9}, "the database was dropped and created again, or a restore replaced it"),
        ({"server_version": 170001}, ""),
    ],
)
def test_a_database_that_is_another_is_described(changed: dict[str, Any], text: str) -> None:
    found = other_database(IDENTITY, structs.replace(IDENTITY, **changed))
    assert (bool(found), found.startswith(text)) == (bool(text), True)


def test_damage_of_a_table_is_not_damage_of_its_index() -> None:
    index = IndexOf(16425, 16423, '"public"."orders_pkey"', "orders_pkey", 8192, "base/5/16425", "base/5/16423")
    old = "invalid page in block 100 of relation base/5/16423"
    for text in (old, 'invalid page in block 100 of relation "base/5/16423"', "Block 100 von »base/5/16423« ungültig"):
        assert other_damage(index, text) == OtherDamage("page 100 of its table can't be read", 100)
    for text in (
        "invalid page in block 1 of relation base/5/16425",
        'could not read block 7 in file "base/5/16425.1"',
        'item order invariant violated for index "orders_pkey"',
    ):
        assert other_damage(index, text) is None
        assert other_damage(index, text, is_unreadable=True) is None
    for text in ("invalid page in block 0 of relation base/5/16423_vm", "block 9 of pg_tblspc/7/PG_17_1/5/16999"):
        assert (other := other_damage(index, text)) is not None
        assert other.page is None
    missing = "missing chunk number 0 for toast value 9 in pg_toast_16423"
    assert other_damage(index, missing) is None
    assert other_damage(index, missing, is_unreadable=True) is not None


def test_conflicts_are_shown_with_their_rows_and_counted_in_junit() -> None:
    row = LiveRow("7", "(0,7)", (LiveCopy("a", "7\tx"), LiveCopy("b", None)))
    report = report_of(LiveConflict(STANDBY_ROWS, "1 row is missing", "a", "b", "public.t", rows=(row,)))
    lines = live_lines(report)
    assert lines[0] == "shard a: compared 1 table with b: 100 rows, 8.0 KiB"
    assert lines[1].endswith("daily at increment 2: 90 rows equal, 5 written since, 3 different")
    assert lines[2:6] == [
        "  conflict: standby-rows (a and b, public.t): 1 row is missing", "    row 7 at (0,7):", "      a: 7\tx",
        "      b: no such row",
    ]  # fmt: skip
    (suite,) = ElementTree.fromstring(junit_of_live(report))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    assert report.to_json()["conflicts"][0]["rows"][0]["copies"][1] == {"of": "b", "line": None, "note": ""}


def test_many_pages_are_counted() -> None:
    assert pages_text([7], 1) == "page 7"
    assert pages_text(range(25), 25).endswith("18, 19 and 5 more")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'name = "shop"\nstore = "file://{tmp_path}/store"\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    return load_fleet(path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max-rate", "20MB"], "--max-rate needs --live"),
        (["--indexes"], "--indexes needs --live"),
        (["--repair-script", "x.sql"], "--repair-script needs --live"),
        (["--live", "--metadata-only"], "--live and --metadata-only are mutually exclusive"),
        (["--live", "--metrics", "metrics.prom"], "--live and --metrics are mutually exclusive"),
        (["daily", "--live", "--increment", "1"], "--live and --increment are mutually exclusive"),
        (["--live", "--max-rate", "fast"], "--max-rate must be a size above 0 with its unit, not 'fast'"),
        (["--live", "--max-rate", "0"], "--max-rate must be a size above 0 with its unit, not '0'"),
        (["--max-seconds", "-1"], "--max-seconds must be at least 0"),
        (["--rows", "abc"], "--rows must be a whole number"),
        (["--rows", "9999999"], "--rows must be at most 1000"),
    ],
)
def test_options_that_do_not_go_together_are_refused(fleet: Fleet, words: list[str], text: str) -> None:
    code, document = run_here(fleet, "check", *words)
    assert (code, document["error"]) == (2, "usage")
    assert text in document["message"]


def test_a_node_that_can_not_be_reached_has_its_own_exit_code_and_needs_no_store(fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "repair.sql"
    code, document = run_here(fleet, "check", "--live", "--repair-script", str(script))
    assert (code, document["error"]) == (6, "node-unreachable"), document
    assert not script.exists()
