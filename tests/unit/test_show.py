"""What `show` says of the tables of a snapshot."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from cli.commands.show import lines_of
from snapshots.listing.listing import Entry
from tests.chains.redefined_chain import BASE, COPIED, build_chain
from tests.unit.made_commits import memory


def test_a_table_that_was_altered_has_the_rows_of_its_first_definition() -> None:
    chain = build_chain(memory())
    tables = [one for one in lines_of(Entry("s", chain), chain) if isinstance(one, Table)]
    (groups,) = [one for one in tables if one.columns[1].header == "group"]
    shown = io.StringIO()
    Console(file=shown, width=200).print(groups)
    rows = {line.split()[1]: int(line.split()[-1]) for line in shown.getvalue().splitlines()[1:]}
    expected = {one.table: len(lines) for one, lines in BASE.items() if one.table != "dropped"}
    expected |= {"swapped": len(COPIED["a"][14][1]), "new": len(COPIED["a"][28][1])}
    assert rows == {f"s.{name}": count for name, count in expected.items()}
