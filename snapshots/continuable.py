"""Whether a chain can go on: everything that would lose changes, or make them impossible to restore, is refused.

In this order, so that the first refusal is the one that tells most and costs least: fleet.toml, what the nodes are,
whether they decode at all, the slots, the tables, the objects in the store. Nothing here is changed, and nothing
needs Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.baseline import BaselineChangedError, check_baseline, check_presence
from fleet.config import Fleet, Node
from fleet.connections import answering
from fleet.groups import Group, SchemaChangedError, Table, read_tables
from fleet.hints import NEW_CHAIN
from fleet.left_out import LeftOut
from fleet.lsn import lsn_from_text, lsn_to_text
from fleet.preconditions import check_decoding
from fleet.sessions import Sessions, in_parallel
from fleet.table_state import TableState, check_table_states, read_table_states
from snapshots.commits import commit_gone
from snapshots.create import CreateRequest
from snapshots.manifest import Chain, FullPart
from snapshots.operations import recorded_commits
from storage.errors import RefusedError
from storage.store import ObjectStore
from wal.archive import archive_prefix, segment_key
from wal.slots import check_slot, slot_name, slot_state

PLACE_QUERY = """
SELECT CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_flush_lsn()::text END
"""
# By its oid a table is found under another name too; by its name where the commit does not have the oid.
GONE_QUERY = """
SELECT c.relpersistence = 'u', c.relkind = 'r', format('%%s.%%s', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = %(oid)s OR (%(oid)s = 0 AND format('%%s.%%s', n.nspname, c.relname) = %(name)s)
"""


class ChainObjectMissingError(RefusedError):
    """An object that the chain needs is gone from the store."""


class GlobalIdRuleChangedError(RefusedError):
    """fleet.toml's [cut] global_id is not the one that the chain was begun with."""


@dataclass(frozen=True, slots=True)
class Continuing:
    """One increment under way. `left_out` is what of the primaries' databases will not be in it."""

    fleet: Fleet
    request: CreateRequest
    store: ObjectStore
    sessions: Sessions
    chain: Chain
    left_out: tuple[LeftOut, ...] = ()


def check_described(fleet: Fleet, chain: Chain) -> tuple[Node, ...]:
    """The nodes that the chain has copies of; raise unless fleet.toml describes the fleet that the chain is of."""
    nodes = check_presence(chain.part.baseline, fleet)
    if chain.part.global_id_form != fleet.global_id:
        raise GlobalIdRuleChangedError(
            f"[cut] global_id was {chain.part.global_id_form!r} at the full snapshot and is {fleet.global_id!r}",
            hint=f"set it back in fleet.toml, or {NEW_CHAIN}",
        )
    return nodes


def check_commits(store: ObjectStore, chain: Chain) -> None:
    """Raise SnapshotMissingError if an increment after the chain's last was committed, and its commit file is gone.

    Going on without it would give its number to another state, while somebody may hold the first for committed.
    """
    recorded = recorded_commits(store, chain.last.operation).get(chain.name, {})
    if lost := sorted(number for number in recorded.values() if number > chain.last.increment):
        raise commit_gone(chain.name, lost[0])


def check_continuable(continuing: Continuing) -> None:
    """Raise unless the chain can go on: commits, baseline, settings, slots, archive, tables, publications, objects."""
    chain, sessions = continuing.chain, continuing.sessions
    check_described(continuing.fleet, chain)
    check_commits(continuing.store, chain)
    check_baseline(chain.part.baseline, sessions.identities)
    check_decoding(sessions)
    in_parallel(lambda node: _check_node(continuing, node), sessions.nodes)
    chain.check_archive()
    check_tables(sessions, chain.part, new_too=True)
    check_objects(continuing.store, chain)


def _check_node(continuing: Continuing, node: Node) -> None:
    """That the node's WAL goes on where the archive ends."""
    chain, slot = continuing.chain, slot_name(continuing.chain.full.operation)
    with answering(node):
        connection = continuing.sessions.connections[node.id]
        state = slot_state(connection, slot)
        (place,) = connection.execute(PLACE_QUERY).fetchone() or (None,)
    segments = chain.segments(node.id)
    listed = segments[-1].range.through if segments else chain.part.base[node.id]
    if place is not None and lsn_from_text(place) < listed:
        raise BaselineChangedError(
            f"node {node.id}: its WAL ends at {place}, before {lsn_to_text(listed)}, where the archive ends: the server"
            " was put back to an earlier state",
            hint=NEW_CHAIN,
            details={"node": node.id, "property": "WAL position", "was": lsn_to_text(listed), "now": place},
        )
    is_ahead = state is not None and state.confirmed > listed
    check_slot(node.id, slot, state, _archived(continuing, node.id, listed) if is_ahead else listed)


def _archived(continuing: Continuing, node: str, listed: int) -> int:
    """Where the node's archive ends in the store: an attempt that died may have left more than commits list."""
    chain, store = continuing.chain, continuing.store
    prefix = archive_prefix(chain.name, node, chain.full.operation)
    present = set(store.list(prefix))
    number = len(chain.segments(node))
    while segment_key(prefix, number + 1) in present:
        number += 1
    if number == len(chain.segments(node)):
        return listed
    # Rare, and the only place where a check needs Arrow.
    from wal.segments import read_metadata

    return read_metadata(store, segment_key(prefix, number), number).range.through


def check_tables(sessions: Sessions, part: FullPart, *, new_too: bool = False) -> None:
    """Raise unless every primary has the snapshot's tables as they were, published as they were.

    After a cut this sees what changed since the checks before it. A table that is new (`new_too`) takes nothing from
    a cut that is made, and is the next one's to refuse.
    """

    def check(node: str) -> None:
        with answering(sessions.fleet.node(node)):
            _check_primary(sessions.connections[node], node, part, new_too=new_too)

    in_parallel(check, sessions.primaries)


def _check_primary(connection: psycopg.Connection[Any], node: str, part: FullPart, *, new_too: bool) -> None:
    groups, states = part.groups[node], part.tables.get(node, {})
    known = {group.name for group in groups}
    tables = [t for t in read_tables(connection, part.rules) if new_too or t.group.name in known]
    check_schema(connection, node, (groups, states), tables)
    check_table_states(node, states, read_table_states(connection, node, part.fleet_id, tables))


def check_schema(
    connection: psycopg.Connection[Any],
    node: str,
    then: tuple[tuple[Group, ...], Mapping[str, TableState]],
    tables: list[Table],
) -> None:
    """Raise SchemaChangedError naming the first table that is new, gone, or not as it was at the full snapshot."""
    groups, states = then
    now = {table.group.name: table for table in tables}
    was = {group.name: group for group in groups}
    # One that is gone first: a table that was renamed is gone and new, and the first says which.
    for name in sorted(was.keys() | now.keys(), key=lambda name: (name in now, name)):
        oid = states[name].oid if name in states else 0
        if name not in now:
            what = _gone(connection, name, oid)
        elif name not in was:
            what = "is new since the full snapshot"
        elif was[name].definition() != now[name].group.definition():
            what = "is not as it was at the full snapshot"
        elif oid not in (0, now[name].oid):
            what = "is another table than at the full snapshot: it was dropped and created again, or renamed"
        else:
            continue
        raise SchemaChangedError(
            f"node {node}: table {name} {what}", hint=NEW_CHAIN, details={"node": node, "group": name}
        )


def _gone(connection: psycopg.Connection[Any], name: str, oid: int) -> str:
    row = connection.execute(GONE_QUERY, {"oid": oid, "name": name}).fetchone()
    if row is None:
        return "is gone since the full snapshot"
    unlogged, is_table, called = row
    if called != name:
        return f"is gone since the full snapshot: it is called {called} now"
    if unlogged:
        return "was made unlogged since the full snapshot: its changes are not in WAL"
    return "is gone since the full snapshot" + ("" if is_table else ": it is no ordinary table now")


def check_objects(store: ObjectStore, chain: Chain) -> None:
    """Raise ChainObjectMissingError unless every object that the chain lists is there, in its size."""
    folders = [f"snapshots/{chain.name}/{part}" for part in ("base", "wal", "schema")]
    present = {key for folder in folders for key in store.list(folder)}
    for commit in chain.commits:
        for key in commit.object_sizes:
            if key not in present:
                what = f"increment {commit.increment}" if commit.increment else "the full snapshot"
                raise ChainObjectMissingError(
                    f"object {key} of {what} is gone from the store",
                    hint=f"put it back from a copy of the store; or {NEW_CHAIN}   (what else is missing:"
                    f" snapshot check {chain.name})",
                    details={"object": key, "increment": commit.increment},
                )
