"""Wait for prepared transactions: before a chain's first cut, before a terminal snapshot's cut, or if they contain DDL.

If a transaction was prepared before the slot was created, PostgreSQL decodes it only at its COMMIT PREPARED, so the
first cut waits for such transactions. Later transactions are decoded at PREPARE, so no cut waits for their rows. The
cut of a terminal snapshot does wait, because committing a prepared transaction after the cut would be a write.

Decoded WAL does not contain DDL. A commit takes its definitions from the catalogs, which show a prepared transaction's
DDL only after COMMIT PREPARED. Before that, a cut that includes the transaction would contain its rows without its DDL,
or its DDL on only one node. Such a cut is invalid, and is retried once the transaction is decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import psycopg
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.progress import Progress
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.relation_locks import PUBLISHING
from cutline.nodes.sessions import Sessions
from cutline.snapshots.records.commit import CutRecord
from cutline.wal.cut.in_doubt import included_and_prepared
from cutline.wal.drain.open_transactions import Awaited, prepared_transactions, report_transactions, wait_error
from cutline.wal.drain.prepare_record import changes_catalogs

POLL_SECONDS = 0.1
# Locks for changing rows or large objects (pg_largeobject, its metadata and their indexes) are not a sign of DDL. DDL
# takes a stronger lock, locks an object that is not a relation, or writes to a catalog. A few kinds of DDL take no such
# lock: docs/consistency.md, "DDL in global transactions".
DDL_QUERY = """
WITH locks AS MATERIALIZED (SELECT * FROM pg_locks WHERE pid IS NULL AND granted)
SELECT DISTINCT own.transactionid::text
  FROM locks JOIN locks own ON own.virtualtransaction = locks.virtualtransaction AND own.locktype = 'transactionid'
 WHERE locks.locktype = 'object' AND locks.classid <> 'pg_largeobject'::regclass
    OR locks.locktype = 'relation' AND (locks.mode = ANY (%s)
       OR locks.mode = 'RowExclusiveLock' AND locks.relation < 16384 AND locks.relation NOT IN (2613, 2683, 2995, 2996))
"""
LOCKERS_QUERY = """
SELECT DISTINCT own.transactionid::text
  FROM pg_locks l JOIN pg_locks own ON own.virtualtransaction = l.virtualtransaction AND own.locktype = 'transactionid'
 WHERE l.pid IS NULL AND own.pid IS NULL AND l.locktype = 'relation' AND l.mode = ANY (%s) AND l.relation = ANY (%s)
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

FindsPrepared = Callable[[Node, psycopg.Connection[Any]], Collection[Awaited]]


def await_prepared(
    sessions: Sessions,
    seconds_max: float,
    progress: Progress,
    what: str = "the first cut",
    shards: Collection[str] | None = None,
) -> None:
    """Wait until every transaction that is prepared now, on one of the `shards` (None: on any), has been decided.

    `what` names the waiting step in messages. Raises NodeUnreachableError, and SlotWaitError, which names the
    transactions still undecided after `seconds_max`.
    """

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[Awaited]:
        return _list_prepared(node, connection) if shards is None or node.id in shards else []

    _await(sessions, seconds_max, progress, what, find)


def await_included_ddl(sessions: Sessions, cut: CutRecord, seconds_max: float, progress: Progress) -> bool:
    """Wait until all prepared transactions with DDL that the cut includes are committed; return whether there were any.

    Their DDL may have changed the catalogs by then: compare the catalogs before reading anything else from them. Raises
    SlotWaitError, which names the transactions left after `seconds_max`. They must be decided with COMMIT PREPARED,
    because they are already committed on another node.
    """
    included = included_and_prepared(cut.nodes)

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[Awaited]:
        prepared = [awaited for awaited in _list_prepared(node, connection) if int(awaited.xid) in included[node.id]]
        locking = {xid for (xid,) in connection.execute(DDL_QUERY, (list(PUBLISHING),))} if prepared else set()
        found: list[Awaited] = []
        for awaited in prepared:
            # The transaction's PREPARE record is more reliable than its locks, if it can still be read.
            recorded = changes_catalogs(node, included[node.id][int(awaited.xid)].lsn, int(awaited.xid))
            if recorded or (recorded is None and awaited.xid in locking):
                found.append(replace(awaited, is_committed_elsewhere=True))
        return found

    return any(included.values()) and _await(sessions, seconds_max, progress, "the cut (it includes their DDL)", find)


def await_lockers(sessions: Sessions, tables: Mapping[str, set[int]], seconds_max: float, progress: Progress) -> None:
    """Wait until every prepared transaction that may have altered one of `tables` (oids by node) is decided.

    Until then, the catalogs don't show the definition under which the table's rows are decoded. Raises the errors of
    `await_prepared`.
    """

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[Awaited]:
        oids = list(tables.get(node.id, ()))
        lockers = {xid for (xid,) in connection.execute(LOCKERS_QUERY, (list(PUBLISHING), oids))} if oids else set()
        return [awaited for awaited in _list_prepared(node, connection) if awaited.xid in lockers]

    _await(sessions, seconds_max, progress, "the cut (WAL contains rows written under their DDL)", find)


def _await(sessions: Sessions, seconds_max: float, progress: Progress, what: str, find: FindsPrepared) -> bool:
    """Wait until all transactions that `find` lists when first called are decided; return whether there were any."""
    notes = WaitNotes(what, progress)
    left = awaited = _on_primaries(sessions, find)
    while left:
        if notes.waited_seconds > seconds_max:
            raise wait_error(what, notes.waited_seconds, left)
        report_transactions(notes, left)
        time.sleep(POLL_SECONDS)
        now = {one.key: one for one in _on_primaries(sessions, _list_prepared)}
        # They have grown older.
        left = [
            replace(now[one.key], is_committed_elsewhere=one.is_committed_elsewhere)
            for one in awaited
            if one.key in now
        ]
    return bool(awaited)


def _on_primaries(sessions: Sessions, find: FindsPrepared) -> list[Awaited]:
    return [awaited for found in sessions.ask_named_primaries(find).values() for awaited in found]


def _list_prepared(node: Node, connection: psycopg.Connection[Any]) -> list[Awaited]:
    return prepared_transactions(node.id, connection)
