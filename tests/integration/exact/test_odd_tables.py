"""Tables of every kind, changed in every way: their constraints, indexes and triggers come back too."""

from __future__ import annotations

import psycopg
import pytest

from tests.chains.exact_chain import EXACT, History, differences
from tests.chains.exact_databases import RANDOM_TRANSACTIONS
from tests.tables.odd_tables import INCREMENTS

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
# What a dump contains besides rows.
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


def test_the_random_history_has_partial_images_and_truncates(history: History) -> None:
    for number in range(len(INCREMENTS)):
        stored = history.commits[number + 1].segments[EXACT]
        assert sum(one.partials for one in stored) > RANDOM_TRANSACTIONS / 3
        assert sum(one.truncates for one in stored) > 0


def test_constraints_indexes_and_triggers_come_back_and_work(history: History) -> None:
    """The table that was left out comes back empty."""
    source, restored = history.databases[EXACT], history.restored_dsn(EXACT)
    back, original = ([*map(str, rows_of(dsn, DEFINITIONS_QUERY))] for dsn in (restored, source))
    assert differences(back, original) == []
    assert rows_of(restored, "SELECT * FROM left_out") == []
    with psycopg.connect(restored) as connection:
        connection.execute("INSERT INTO watched VALUES (1000, 'the trigger works')")
        assert connection.execute("SELECT watched FROM seen WHERE watched = 1000").fetchall() == [(1000,)]
        connection.rollback()
