"""Tables of every kind, changed in every way: what is no row comes back too, and a part of a snapshot alone."""

from __future__ import annotations

import psycopg
import pytest

from tests.chains.exact_chain import EXACT, History, differences
from tests.chains.exact_databases import RANDOM_TRANSACTIONS
from tests.tables.odd_tables import INCREMENTS

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
# What a dump says of everything but rows.
DEFINITIONS_QUERY = """
SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE connamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname !~ '^(pg_|information_schema)'
UNION ALL SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT 'identity', relname, relreplident::text FROM pg_class WHERE relnamespace = 'public'::regnamespace
ORDER BY 1, 2, 3
"""


def rows_of(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def test_the_random_history_left_values_out_and_truncated(history: History) -> None:
    for number in range(len(INCREMENTS)):
        stored = history.commits[number + 1].segments[EXACT]
        assert sum(one.partials for one in stored) > RANDOM_TRANSACTIONS / 3
        assert sum(one.truncates for one in stored) > 0


def test_what_is_no_row_comes_back_and_works(history: History) -> None:
    """Constraints, indexes, triggers, the table that was left out."""
    source, restored = history.databases[EXACT], history.back(EXACT)
    back, there = ([*map(str, rows_of(dsn, DEFINITIONS_QUERY))] for dsn in (restored, source))
    assert differences(back, there) == []
    assert rows_of(restored, "SELECT * FROM left_out") == []
    with psycopg.connect(restored) as connection:
        connection.execute("INSERT INTO watched VALUES (1000, 'the trigger works')")
        assert connection.execute("SELECT watched FROM seen WHERE watched = 1000").fetchall() == [(1000,)]
        connection.rollback()
