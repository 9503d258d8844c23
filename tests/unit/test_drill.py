"""What fleet.toml expects of a drill, how answers are compared with it, and what a drill proves."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cutline.cli.output.junit import junit_of_drill
from cutline.cli.output.restore_report import drill_document, drill_lines
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import AssertionTable, Expected, FleetFileError, Node, check_drill, load_fleet
from cutline.restore.drill import servers
from cutline.restore.drill.assertions import AssertionResult, expected_text, is_as_expected
from cutline.restore.drill.drill import EXIT_CODES, DrillReport
from cutline.restore.drill.servers import DrillUnfitError, naming_unfit
from cutline.restore.plan.report import NodeReport, RefusedStatement, RestoreReport
from cutline.restore.targets.obstacles import Obstacles, TargetLacksError
from cutline.restore.targets.requirements import DRILL_WITHOUT, WITHOUT

FLEET = """
name = "shop"
store = "/nowhere"
[[node]]
id = "a"
dsn = "dbname=shop host=a"
[[node]]
id = "b"
dsn = "dbname=shop host=b"
backup_of = "a"
"""
LEFT_OUT = AssertionTable("a", "SELECT 1")
OWN = "or drill on servers of your own: snapshot drill weekly --to FILE"


def drill_of(path: Path, text: str) -> tuple[AssertionTable, ...]:
    path.write_text(FLEET + text)
    return load_fleet(path).drill.assertion


def test_every_kind_of_expectation_is_read(tmp_path: Path) -> None:
    kinds = {
        "1": 1, "1.5": 1.5, "true": True, '"x"': "x", "[1, 2]": (1, 2),
        '[[1, "x"], [2, false]]': ((1, "x"), (2, False)),
    }  # fmt: skip
    for text, value in kinds.items():
        (found,) = drill_of(
            tmp_path / "fleet.toml", f'[[drill.assertion]]\nnode = "a"\nsql = "SELECT 1"\nexpected = {text}\n'
        )
        assert (found.expected, type(found.expected)) == (value, type(value))
    assert drill_of(tmp_path / "fleet.toml", '[[drill.assertion]]\nnode = "a"\nsql = "SELECT 1"\n') == (LEFT_OUT,)
    assert drill_of(tmp_path / "fleet.toml", "") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('node = "a"', "lacks the key `sql`"),
        ('node = "a"\nsql = ""', "length >= 1"),
        ('node = "a"\nsql = "SELECT 1"\nexpect = 1', "unknown key `expect`"),
        ('node = "a"\nsql = "SELECT 1"\ntimeout = "0"', "`drill.assertion.timeout` is 0"),
        ('node = "a"\nsql = "SELECT 1"\nexpected = 2026-11-22', "expected"),
        ('node = "a"\nsql = "SELECT 1"\nexpected = [[[1]]]', "expected"),
    ],
)
def test_a_wrong_assertion_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(FleetFileError) as refused:
        drill_of(tmp_path / "fleet.toml", f"[[drill.assertion]]\n{text}\n")
    assert problem in refused.value.message


def test_the_form_of_assertions_is_named_where_the_settings_of_drills_belong(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError) as refused:
        drill_of(tmp_path / "fleet.toml", '[[drill]]\nnode = "a"\nsql = "SELECT 1"\n')
    assert "[[drill.assertion]]" in refused.value.hint


def test_only_a_drill_needs_its_nodes_to_be_primaries(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    drill_of(path, '[[drill.assertion]]\nnode = "b"\nsql = "SELECT 1"\n')
    with pytest.raises(FleetFileError, match=r"drill\.assertion 1: node names b, which is not a primary"):
        check_drill(load_fleet(path))


@pytest.mark.parametrize(
    ("expected", "rows", "holds"),
    [
        (LEFT_OUT.expected, [], True),
        (LEFT_OUT.expected, [[None]], False),
        (2, [["2"]], True),
        (2, [["2.00"]], True),
        (2, [["2"], ["2"]], False),
        (2, [["2", "2"]], False),
        (2, [], False),
        (2, [[None]], False),
        (2, [["two"]], False),
        (0.1, [["0.1"]], True),
        (0.1, [["0.10000000000000001"]], False),
        ("x", [["x"]], True),
        ("", [[None]], False),
        ((), [], True),
        ((1, "x"), [["1"], ["x"]], True),
        ((1, 2), [["2"], ["1"]], False),
        (((1, "x"), (2, "y")), [["1", "x"], ["2", "y"]], True),
    ],
)
def test_answers_are_compared_as_postgresql_prints_them(
    expected: Expected, rows: list[list[str | None]], *, holds: bool
) -> None:
    assert is_as_expected(expected, rows, [False, False]) == holds


def test_booleans_are_only_booleans() -> None:
    assert is_as_expected(expected=True, rows=[["t"]], booleans=[True])
    assert not is_as_expected(expected=False, rows=[["t"]], booleans=[True])
    assert not is_as_expected(expected=True, rows=[["t"]], booleans=[False])
    assert not is_as_expected(1, [["t"]], [True])


def test_a_drill_proves_something_only_if_everything_was_asked() -> None:
    def report(*holds: bool | None) -> DrillReport:
        restored = RestoreReport("weekly", 3, "op", [NodeReport("a", "drill", 5)], rows=5)
        return DrillReport(restored, tuple(AssertionResult(LEFT_OUT, one, "why") for one in holds), 1.0)

    outcomes = {(): 4, (True,): 0, (True, None): 4, (True, False): 1, (None, False): 1}
    for holds, code in outcomes.items():
        assert EXIT_CODES[report(*holds).result] == code
    lines = drill_lines(report(*[None, False]))
    assert lines[-3:-1] == ["skipped: a: SELECT 1: why", "FAILS: a: SELECT 1: why"]
    assert [one["holds"] for one in drill_document(report(*[True, None]))["assertions"]] == [True, None]
    assert "no [[drill.assertion]]" in drill_lines(report())[-2]
    assert 'tests="2" failures="0" skipped="1"' in junit_of_drill(report())
    assert 'tests="3" failures="1" skipped="1"' in junit_of_drill(report(*[None, False]))


def test_a_drill_shows_what_is_wrong_with_the_restored_databases_once() -> None:
    restored = RestoreReport("weekly", 3, "op", [NodeReport("a", "drill", 5)], warnings=["shown", "a view is empty"])
    report = DrillReport(restored, (AssertionResult(LEFT_OUT, holds=True, why=""),), 1.0)
    assert [line for line in drill_lines(report, ["shown"]) if line.startswith("warning")] == [
        "warning: a view is empty"
    ]
    assert drill_document(report)["warnings"] == restored.warnings


def test_a_junit_report_names_what_was_refused() -> None:
    """With assertions that hold, nothing else says that the drill was inconclusive."""
    refused = [
        RefusedStatement("a", "drill", "EXTENSION pg_cron", reason="not available"),
        RefusedStatement("b", "drill", "TABLE DATA cron.job", reason="it needs EXTENSION pg_cron"),
    ]
    restored = RestoreReport("weekly", 3, "op", [NodeReport("a", "drill", 5)], rows=5, refused=refused)
    report = DrillReport(restored, (AssertionResult(LEFT_OUT, holds=True, why=""),), 1.0)
    assert EXIT_CODES[report.result] == 4
    (suite,) = ElementTree.fromstring(junit_of_drill(report))
    assert [suite.get(count) for count in ("tests", "failures", "skipped")] == ["4", "0", "2"]
    skipped = [(case.get("classname"), case.get("name"), *(one.get("message") for one in case)) for case in suite]
    assert skipped == [
        ("weekly at increment 3", "the restore"),
        ("a", "EXTENSION pg_cron", "refused: not available"),
        ("b", "TABLE DATA cron.job", "refused: it needs EXTENSION pg_cron"),
        ("a", "SELECT 1"),
    ]


@pytest.mark.parametrize(
    ("hint", "kept"),
    [
        ([WITHOUT, "or restore to servers that can run the statement"], [WITHOUT, OWN]),
        (["create it and repeat the command", f"or {WITHOUT}", "or in steps: --schema-only --allow-refused-ddl"],
         [WITHOUT, OWN]),
        (["[drill] extensions", f"or {WITHOUT}"], ["[drill] extensions", f"or {WITHOUT}", OWN]),
        (["grant the role what it needs"], [OWN.removeprefix("or ")]),
        ([DRILL_WITHOUT], [DRILL_WITHOUT]),
    ],
)  # fmt: skip
def test_of_a_restores_hints_a_drill_has_those_that_help_it(hint: list[str], kept: list[str]) -> None:
    with pytest.raises(DrillUnfitError) as raised, naming_unfit("weekly"):
        raise TargetLacksError("node s1: no", hint=hint)
    assert raised.value.hint.splitlines() == kept


def test_on_two_shards_the_same_hint_is_there_once() -> None:
    obstacles = Obstacles()
    for node in ("s1", "s2"):
        obstacles.add(TargetLacksError(f"node {node}: in only one database: pg_cron", hint=DRILL_WITHOUT))
    with pytest.raises(DrillUnfitError) as raised, naming_unfit("weekly"):
        obstacles.raise_found()
    assert raised.value.hint == DRILL_WITHOUT


def test_what_is_expected_is_shown() -> None:
    shown = {LEFT_OUT.expected: "no rows", "x": '"x"', True: "true", ((1, "x"),): '(1, "x")', (1, 2): "(1), (2)"}
    assert {expected_text(expected): text for expected, text in shown.items()} == {one: one for one in shown.values()}


def test_a_session_that_can_not_be_ended_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter whether its server can still be asked to end it."""
    stopped: list[EmbeddedNode] = []
    monkeypatch.setattr(servers, "stop_server", lambda node, *, immediate: (stopped.append(node), immediate)[1])
    server = EmbeddedNode("s1", tmp_path)
    assert servers.end_in_any_case(Node("s1", f"host={tmp_path} port=5432"), server, 1)
    assert stopped == [server]
