"""What `show` says of the tables of a snapshot."""

from __future__ import annotations

import tracemalloc

from msgspec import structs

from cutline.cli.commands.show import _rows_statement, lines_of, script_line, statement_lines
from cutline.cli.output.tables import FittingTable
from cutline.snapshots.ddl.extension_tables import ConfigurationRows, ExtensionTable
from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.records.chain import Chain, summary_of
from tests.chains.redefined_chain import BASE, COPIED, build_chain
from tests.unit.made_commits import full_commit, increment_commit, memory


def test_a_table_that_was_altered_has_the_rows_of_its_first_definition() -> None:
    chain = build_chain(memory())
    tables = [one for one in lines_of(Entry("s", chain), chain) if isinstance(one, FittingTable)]
    (groups,) = [one for one in tables if one.titles[1] == "group"]
    _, *lines = groups.lines(None)
    rows = {line.split()[1]: int(line.split()[-1]) for line in lines}
    expected = {one.table: len(lines) for one, lines in BASE.items() if one.table != "dropped"}
    expected |= {"swapped": len(COPIED["a"][14][1]), "new": len(COPIED["a"][28][1])}
    assert rows == {f"s.{name}": count for name, count in expected.items()}


def test_a_promotion_is_told_once_for_its_shard() -> None:
    """The old primary returns as a standby later, on the timeline of the server that was promoted."""
    timelines = ({}, {"a": 2}, {"a": 2, "b": 2}, {"a": 3, "b": 3})
    increments = (structs.replace(increment_commit(n), timelines=now) for n, now in enumerate(timelines, 1))
    chain = Chain(full_commit(), tuple(increments))
    lines = [line for line in lines_of(Entry("daily", chain), chain) if isinstance(line, str) and "promoted" in line]
    assert lines == [
        "increment 2: shard a is on timeline 2, before on 1: a standby was promoted",
        "increment 4: shard a is on timeline 3, before on 2: a standby was promoted",
    ]


def test_the_sizes_of_the_rows_after_a_merge_add_up_to_that_of_the_snapshot() -> None:
    base, later = structs.replace(full_commit(), increment=2), increment_commit(3)
    chain = Chain(base, (later,))
    summaries = tuple(summary_of(increment_commit(number)) for number in (1, 2, 3))
    entry = Entry("daily", chain, summaries=summaries, first=2, base_bytes=77)
    heading, *lines = lines_of(entry, chain)
    assert str(heading).endswith(", 97 B")
    (cuts,) = [one for one in lines if isinstance(one, FittingTable) and "size" in one.titles]
    size = cuts.titles.index("size")
    # An increment of these has 20 B.
    assert [str(row[size]) for row in cuts.rows] == ["77 B", "20 B"]


def test_no_line_of_the_script_begins_with_a_command_of_psql() -> None:
    """Names, constants and comments with line ends stay on one line; only rows have several."""
    odd = "x\n\\! touch /tmp/x"
    insert = f"INSERT INTO \"{odd}\" VALUES\n('{odd}'),\n(E'\n\\\\! x');\n".encode()
    table = ExtensionTable(extension="e", schema="public", name=odd, rows=2, size=9)
    rows = [
        _rows_statement(ConfigurationRows(table, statements), encoding)
        for statements, encoding in ((insert, "UTF8"), (b"INSERT INTO t VALUES\n('\xe9');\n", "LATIN1"))
    ]
    found = {"node": "s1", "database": "shop", "globals": [], "with_passwords": False, "statements": []}
    lines = statement_lines([found | {"extension_rows": rows}])
    assert lines[1:] == [
        "SET standard_conforming_strings = on;",
        'INSERT INTO U&"x\\+00000a\\\\! touch /tmp/x" VALUES',
        "(E'x\\U0000000a\\\\! touch /tmp/x'),",
        "(E'\\U0000000a\\\\! x');",
        r"-- left out: public.x\n\! touch /tmp/x: its rows are in LATIN1;"
        " a restore writes them to its file of refused statements",
    ]


def test_a_long_constant_takes_little_memory() -> None:
    constants = [f"'{'x' * 1_000_000}'", f"'{chr(39) * 1_000_000}'", "E'" + "\\\\x" * 300_000 + "'"]
    tracemalloc.start()
    try:
        assert [script_line(one) for one in constants] == constants
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
