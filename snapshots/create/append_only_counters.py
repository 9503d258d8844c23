"""Append-only tables over a cut: nobody may have updated or deleted from one since the commit before.

fleet/tables/append_only.py says what PostgreSQL's counters tell. They are asked before anything is done, and once
more after the cut: they are late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from fleet.nodes.connections import raising_unreachable
from fleet.nodes.sessions import Sessions
from fleet.tables.append_only import Counters, check_counters, read_counters, unknown_counters_error
from fleet.tables.left_out import LeftOut, LeftOutKind
from fleet.tables.table_state import TableState
from snapshots.ddl.table_changes import DdlPlan, KnownTables
from snapshots.records.chain import Chain


def check_counted(
    sessions: Sessions, states: Mapping[str, Mapping[str, TableState]], since: str
) -> tuple[LeftOut, ...]:
    """Raise AppendOnlyChangedError if an append-only table was updated or deleted from since the `states`, by shard.

    Returns the warnings of those of which nothing tells. `since` says of when the states are.
    """
    found: list[LeftOut] = []
    for node, connection in sessions.primaries.items():
        oids, was = _read_counters(states.get(node, {}).values())
        if not was:
            continue
        with raising_unreachable(sessions.fleet.node(node)):
            read = read_counters(connection, oids)
        now = {name: read[oid] for oid, name in oids.items()}
        check_counters(node, since, was, now)
        found += unknown_counters_error(node, was, now)
    return tuple(found)


def _read_counters(states: Iterable[TableState]) -> tuple[dict[int, str], dict[str, Counters]]:
    kept = [(state, state.counted) for state in states if state.counted]
    return {state.oid: state.table for state, _ in kept}, {state.table: counters for state, counters in kept}


def with_counters(plan: DdlPlan, known: KnownTables) -> dict[str, dict[str, TableState]]:
    """From which states on nobody may have updated or deleted, by shard and by the tables' names now.

    That of the commit before; of a table that is copied anew that of the plan, which is older than the copy.
    """
    found: dict[str, dict[str, TableState]] = {}
    for shard, one in plan.shards.items():
        before = {state.oid: state for state in known.states[shard].values()}
        copied = {table.oid for table in one.copied}
        found[shard] = {
            name: state if state.oid in copied else structs.replace(before[state.oid], table=name)
            for name, state in one.states.items()
        }
    return found


def since_of(chain: Chain) -> str:
    """The chain's last commit as a refusal names it."""
    return f"increment {chain.last.increment}" if chain.last.increment else "the full snapshot"


def with_warnings(
    left_out: Iterable[LeftOut], chain: Chain, found: Iterable[LeftOut], copied: Collection[tuple[str, str]] = ()
) -> tuple[LeftOut, ...]:
    """What an increment leaves out, with the warnings that were `found` and those of the chain's commits before.

    What was not known of a table at one commit is not known at the later ones, unless it was `copied` (node and name)
    anew in between.
    """
    kind = LeftOutKind.UNCOUNTED_TABLE
    before = [one for one in chain.left_out if one.kind == kind and (one.node, one.name) not in copied]
    return tuple(dict.fromkeys((*left_out, *before, *found)))
