"""Append-only tables: whether one was updated or deleted from, which nobody follows, by PostgreSQL's own counters.

The counters (PostgreSQL manual, "The Cumulative Statistics System") are those of every attempt: rows of transactions
that were rolled back count too, and so does what logical replication, cascades and ON CONFLICT do. A TRUNCATE counts
for nothing, and is followed. A row that moves to another partition is deleted from the one it leaves.

They are late: a session reports at the end of a transaction, at most once a second, an idle one within 10 s, and one
that goes on with a long transaction when that ends; of a prepared transaction the session that decides it does. So
an UPDATE before a cut may be counted after it, and is noticed by the next increment.

They are lost when a server crashes, and by the pg_stat_reset functions. Either leaves a trace: a crash resets all that
the server counts, the archiver's counters too, and resetting a table's says so of its database. Where there is one,
equal counters tell nothing: that is a warning, as nobody knows of any change. With track_counts off nothing counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fleet.hints import NEW_CHAIN
from fleet.record import Count, Record
from fleet.tables.left_out import WHY, LeftOut, LeftOutKind
from storage.errors import RefusedError

if TYPE_CHECKING:
    import psycopg

# Settings of roles and databases are not ours, but those who write have them.
COUNTERS_QUERY = """
SELECT t.oid::bigint, pg_stat_get_tuples_updated(t.oid), pg_stat_get_tuples_deleted(t.oid),
       CASE WHEN current_setting('track_counts')::bool AND NOT EXISTS (
                 SELECT FROM pg_db_role_setting g CROSS JOIN unnest(g.setconfig) AS setting
                  WHERE g.setdatabase IN (0, d.oid) AND setting ~* '^track_counts=(of|f|n|0)')
            THEN concat_ws(' ', a.stats_reset, pg_stat_get_db_stat_reset_time(d.oid)) ELSE '' END
  FROM unnest(%s::oid[]) AS t (oid), pg_stat_archiver AS a, pg_database AS d WHERE d.datname = current_database()
"""
SNAPSHOT_BEGAN = "this snapshot was begun"
IDENTITY = "ALTER TABLE … REPLICA IDENTITY FULL, or a primary key"


class AppendOnlyChangedError(RefusedError):
    """An append-only table was updated or deleted from, and nobody knows which rows."""


class Counters(Record, frozen=True):
    """How many rows of a table were updated and deleted; `since` stamps what they count from, "" if nothing counts."""

    updated: Count
    deleted: Count
    since: str

    @property
    def rows(self) -> tuple[int, int]:
        """What they count."""
        return self.updated, self.deleted


def read_counters(connection: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, Counters]:
    """The counters of these tables, by oid."""
    found = connection.execute(COUNTERS_QUERY, (list(oids),)).fetchall()
    return {oid: Counters(updated, deleted, since) for oid, updated, deleted, since in found}


def has_changed(was: Counters, now: Counters) -> bool:
    """Whether rows were updated or deleted between the two for certain."""
    # Those of a table may be as they were though its database's stamp is another: that of another table was reset.
    return now.rows not in (was.rows, (0, 0))


def are_counters_unknown(was: Counters, now: Counters) -> bool:
    """Whether rows may have been updated or deleted between the two, and nothing tells."""
    return not has_changed(was, now) and (was != now or not now.since)


def check_counters(node: str, since: str, was: Mapping[str, Counters], now: Mapping[str, Counters]) -> None:
    """Raise AppendOnlyChangedError for the tables in both that were updated or deleted from.

    `since` says of when `was` is: an increment, or SNAPSHOT_BEGAN.
    """
    changed = [name for name in sorted(was.keys() & now.keys()) if has_changed(was[name], now[name])]
    if not changed:
        return
    counted = "; ".join(f"{name} ({_difference_text(was[name], now[name])})" for name in changed)
    message = (
        f"node {node}: append-only tables were updated or deleted from since {since}, perhaps by what was rolled back,"
        f" and which rows is not known: {counted}"
    )
    if since == SNAPSHOT_BEGAN:
        hint = f"repeat the command once nobody does, or give each an identity: {IDENTITY}"
    else:
        message += f"; {since} itself may lack the earliest of these changes, as sessions report them late"
        hint = f"give each an identity, and the next increment copies it anew: {IDENTITY};\nor {NEW_CHAIN}"
    raise AppendOnlyChangedError(
        message,
        hint=hint,
        details={"node": node, "tables": changed},
    )


def _difference_text(was: Counters, now: Counters) -> str:
    before = was.rows if all(b <= n for b, n in zip(was.rows, now.rows, strict=True)) else (0, 0)
    updated, deleted = (n - b for n, b in zip(now.rows, before, strict=True))
    return f"{updated} rows updated, {deleted} deleted"


def unknown_counters_error(node: str, was: Mapping[str, Counters], now: Mapping[str, Counters]) -> list[LeftOut]:
    """The warning of every table in both of which nothing tells whether it was updated or deleted from."""
    kind = LeftOutKind.UNCOUNTED_TABLE
    names = [name for name in sorted(was.keys() & now.keys()) if are_counters_unknown(was[name], now[name])]
    return [LeftOut(node, kind, name, WHY[kind]) for name in names]
