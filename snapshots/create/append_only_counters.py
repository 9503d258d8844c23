"""Check that no append-only table was updated or deleted from since the previous commit.

fleet/tables/append_only.py describes PostgreSQL's counters. They are read before anything is changed, and again after
the cut, because sessions report to them late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from cutline.fleet.nodes.connections import raising_unreachable
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.tables.append_only import Counters, check_counters, read_counters, unknown_counters_warnings
from cutline.fleet.tables.left_out import LeftOut, LeftOutKind
from cutline.fleet.tables.table_state import TableState
from cutline.snapshots.ddl.table_changes import DdlPlan, KnownTables
from cutline.snapshots.records.chain import Chain


def check_append_only(
    sessions: Sessions, states: Mapping[str, Mapping[str, TableState]], since: str
) -> tuple[LeftOut, ...]:
    """Raise AppendOnlyChangedError if an append-only table was updated or deleted from since the `states`, by shard.

    Returns a warning for each table whose counters can't be compared. `since` names the moment of the states.
    """
    warnings: list[LeftOut] = []
    for node, connection in sessions.primaries.items():
        oids, was = _counters_in(states.get(node, {}).values())
        if not was:
            continue
        with raising_unreachable(sessions.fleet.node(node)):
            read = read_counters(connection, oids)
        now = {name: read[oid] for oid, name in oids.items()}
        check_counters(node, since, was, now)
        warnings += unknown_counters_warnings(node, was, now)
    return tuple(warnings)


def _counters_in(states: Iterable[TableState]) -> tuple[dict[int, str], dict[str, Counters]]:
    """The names by oid, and the counters by name, of the tables whose states have counters."""
    counted = [(state, state.counted) for state in states if state.counted]
    return {state.oid: state.table for state, _ in counted}, {state.table: counters for state, counters in counted}


def states_to_compare(plan: DdlPlan, known: KnownTables) -> dict[str, dict[str, TableState]]:
    """The states since which nobody may have updated or deleted, by shard and by the tables' current names.

    They are those of the previous commit; for a table that is copied again, that of the plan, which precedes the copy.
    """
    states: dict[str, dict[str, TableState]] = {}
    for shard, one in plan.shards.items():
        before = {state.oid: state for state in known.states[shard].values()}
        copied = {table.oid for table in one.to_copy}
        states[shard] = {
            name: state if state.oid in copied else structs.replace(before[state.oid], table=name)
            for name, state in one.states.items()
        }
    return states


def last_commit_label(chain: Chain) -> str:
    """The chain's last commit as error messages name it."""
    return f"increment {chain.last.increment}" if chain.last.increment else "the full snapshot"


def with_warnings(
    left_out: Iterable[LeftOut], chain: Chain, warnings: Iterable[LeftOut], copied: Collection[tuple[str, str]] = ()
) -> tuple[LeftOut, ...]:
    """What an increment leaves out, with the new `warnings` and those of the chain's previous commits.

    A warning about a table holds for all later commits, until the table is `copied` (node and name) again.
    """
    kind = LeftOutKind.UNCOUNTED_TABLE
    before = [one for one in chain.left_out if one.kind == kind and (one.node, one.name) not in copied]
    return tuple(dict.fromkeys((*left_out, *before, *warnings)))
