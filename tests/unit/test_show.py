"""What `show` says of the tables of a snapshot."""

from __future__ import annotations

from cli.commands.show import lines_of
from cli.output.tables import FittingTable
from snapshots.listing.entry import Entry
from tests.chains.redefined_chain import BASE, COPIED, build_chain
from tests.unit.made_commits import memory


def test_a_table_that_was_altered_has_the_rows_of_its_first_definition() -> None:
    chain = build_chain(memory())
    tables = [one for one in lines_of(Entry("s", chain), chain) if isinstance(one, FittingTable)]
    (groups,) = [one for one in tables if one.titles[1] == "group"]
    _, *lines = groups.lines(None)
    rows = {line.split()[1]: int(line.split()[-1]) for line in lines}
    expected = {one.table: len(lines) for one, lines in BASE.items() if one.table != "dropped"}
    expected |= {"swapped": len(COPIED["a"][14][1]), "new": len(COPIED["a"][28][1])}
    assert rows == {f"s.{name}": count for name, count in expected.items()}
