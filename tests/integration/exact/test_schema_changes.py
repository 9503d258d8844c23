"""Schema changes of every kind between increments: each increment comes back with the schema and the rows of its cut.

Compared with PostgreSQL's own COPY and pg_dump of the source at moments when nothing ran there. Every case of
`schema_cases`, `table_cases` and `odd_table_cases` is on one shard of the exact chain; test_rows.py compares that
shard as a whole.
"""

from __future__ import annotations

import pytest

from tests.chains.exact_chain import REDEFINED, RESTORED, History
from tests.chains.exact_databases import SCHEMA_CASES

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
INCREMENTS = (1, 2, 3)


@pytest.mark.parametrize("increment", RESTORED)
@pytest.mark.parametrize("case", SCHEMA_CASES)
def test_every_row_comes_back_in_the_columns_of_its_cut(history: History, case: str, increment: int) -> None:
    history.assert_same(REDEFINED, increment, case)


@pytest.mark.parametrize("increment", INCREMENTS)
def test_only_tables_whose_changes_wal_does_not_describe_are_copied_again(history: History, increment: int) -> None:
    expected = {
        f"{name}.{table}" for name, case in SCHEMA_CASES.items() for table in case.copied_again[increment - 1].split()
    }
    assert copied_tables(history, increment) == expected


def copied_tables(history: History, increment: int) -> set[str]:
    """Return the tables of the shard that the increment copied again."""
    changes = history.chain.increments[increment - 1].definition_changes
    assert changes
    continued = changes.successions.get(REDEFINED, {})
    return {group.name for group in changes.groups.get(REDEFINED, ()) if group.number not in continued}
