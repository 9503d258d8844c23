"""A merged case does what its cases do alone, on other shards."""

from __future__ import annotations

from tests.fuzz.merging import merge_cases, options_on
from tests.fuzz.script import Case, Fate, Statement, Transaction, format_case, parse_case

ONE = Case(
    (((0, 1), "CREATE one"), ((1,), "CREATE only here")),
    ((Transaction(Fate.HALF, ((1, (Statement("a"),)), (0, (Statement("b"),)))),), (), ()),
    {"encoding": "LATIN1", "check": "yes", "set search_path": "x"},
)
TWO = Case(
    (((0, 1), "CREATE two"),),
    ((), (Transaction(Fate.COMMIT, ((0, (Statement("c"),)),), has_savepoints=False, at="base copied"),)),
    {"encoding": "UTF8", "check": "no"},
)


def test_every_merged_case_has_its_own_shards() -> None:
    both = merge_cases([ONE, TWO])
    assert both.setup == (((0, 1), "CREATE one"), ((1,), "CREATE only here"), ((2, 3), "CREATE two"))
    moved = Transaction(Fate.COMMIT, ((2, (Statement("c"),)),), has_savepoints=False, at="base copied")
    assert both.intervals == (ONE.intervals[0], (moved,), ())
    assert parse_case(format_case(both)) == both


def test_a_database_has_the_options_of_its_case_and_the_run_those_of_the_first() -> None:
    both = merge_cases([ONE, TWO])
    assert [options_on(both.options, shard) for shard in range(4)] == [
        {"check": "yes", "encoding": "LATIN1", "set search_path": "x"},
        {"check": "yes", "encoding": "LATIN1", "set search_path": "x"},
        {"check": "yes", "encoding": "UTF8"},
        {"check": "yes", "encoding": "UTF8"},
    ]
    assert options_on(ONE.options, 1) == ONE.options
