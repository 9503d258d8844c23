"""Append-only tables: detect updates and deletes, which are not captured, by PostgreSQL's counters.

The counters (PostgreSQL manual, "The Cumulative Statistics System") count attempts: they include rows of transactions
that were rolled back, and changes by logical replication, cascades and ON CONFLICT. TRUNCATE is not counted, but it is
captured. A row that moves to another partition counts as deleted from the one it leaves.

They lag behind: a session reports at the end of a transaction, at most once a second; an idle session within 10 s; a
session in a long transaction when that ends. A prepared transaction is reported by the session that decides it. So an
UPDATE before a cut may be counted after it, and is then noticed by the next increment.

They are lost when a server crashes, and through the pg_stat_reset functions. Both leave a trace: a crash resets all
counters of the server, the archiver's too, and resetting a table's counters updates the reset time of its database.
After such a reset, equal counters prove nothing; that is only a warning, as no change is known. With track_counts off
nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cutline.fleet.hints import NEW_CHAIN
from cutline.fleet.record import Count, Record
from cutline.fleet.tables.left_out import WHY, LeftOut, LeftOutKind
from cutline.storage.errors import ChainEnd, RefusedError

if TYPE_CHECKING:
    import psycopg

# track_counts may be off for the roles or databases of writers, although it is on in our session.
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
    """An append-only table was updated or deleted from, and it is not known which rows."""


class Counters(Record, frozen=True):
    """The rows of a table updated and deleted. `since` stamps the last reset, "" if track_counts is off."""

    updated: Count
    deleted: Count
    since: str

    @property
    def rows(self) -> tuple[int, int]:
        """The rows updated and the rows deleted."""
        return self.updated, self.deleted


def read_counters(connection: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, Counters]:
    """The counters of these tables, by oid."""
    rows = connection.execute(COUNTERS_QUERY, (list(oids),)).fetchall()
    return {oid: Counters(updated, deleted, since) for oid, updated, deleted, since in rows}


def has_changed(was: Counters, now: Counters) -> bool:
    """Whether rows certainly were updated or deleted between the two."""
    # Only the rows are compared: the stamp also changes when another table of the database is reset.
    return now.rows not in (was.rows, (0, 0))


def are_counters_unknown(was: Counters, now: Counters) -> bool:
    """Whether rows may have been updated or deleted between the two without the counters showing it."""
    return not has_changed(was, now) and (was != now or not now.since)


def check_counters(node: str, since: str, was: Mapping[str, Counters], now: Mapping[str, Counters]) -> None:
    """Raise AppendOnlyChangedError naming the tables, of those in both, that were updated or deleted from.

    `since` names the time of `was`, for the message: an increment, or SNAPSHOT_BEGAN.
    """
    changed = [name for name in sorted(was.keys() & now.keys()) if has_changed(was[name], now[name])]
    if not changed:
        return
    counted = "; ".join(f"{name} ({_difference_text(was[name], now[name])})" for name in changed)
    message = (
        f"node {node}: append-only tables were updated or deleted from since {since}, perhaps by transactions that were"
        f" rolled back; which rows is not known: {counted}"
    )
    ends_chain = ChainEnd.NO
    if since == SNAPSHOT_BEGAN:
        hint = [f"repeat the command when nothing updates them, or give each a replica identity: {IDENTITY}"]
    else:
        message += f"; {since} itself may lack the earliest of these changes, as sessions report them late"
        hint = [
            f"give each a replica identity, and the next increment copies it again: {IDENTITY};",
            f"or {NEW_CHAIN}",
        ]
        ends_chain = ChainEnd.PERHAPS
    raise AppendOnlyChangedError(
        message,
        hint=hint,
        ends_chain=ends_chain,
        details={"node": node, "tables": changed},
    )


def _difference_text(was: Counters, now: Counters) -> str:
    before = was.rows if all(b <= n for b, n in zip(was.rows, now.rows, strict=True)) else (0, 0)
    updated, deleted = (n - b for n, b in zip(now.rows, before, strict=True))
    return f"{updated} rows updated, {deleted} deleted"


def unknown_counters_warnings(node: str, was: Mapping[str, Counters], now: Mapping[str, Counters]) -> list[LeftOut]:
    """A warning for every table, of those in both, that may have been updated or deleted from unnoticed."""
    kind = LeftOutKind.UNCOUNTED_TABLE
    names = [name for name in sorted(was.keys() & now.keys()) if are_counters_unknown(was[name], now[name])]
    return [LeftOut(node, kind, name, WHY[kind]) for name in names]
