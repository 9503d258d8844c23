"""Compare the counters that reveal updates and deletes in append-only tables.

nodes/table_state.py describes PostgreSQL's counters. The counters are read before anything is changed and again after
the cut, because sessions update them late.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping

from msgspec import structs

from cutline.nodes.connections import raising_unreachable
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.nodes.sessions import Sessions
from cutline.nodes.table_state import Counters, TableState, check_counters, read_counters, unknown_counters_warnings
from cutline.snapshots.ddl.table_changes import DdlPlan, KnownTables
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import point_label


def check_append_only(
    sessions: Sessions, states: Mapping[str, Mapping[str, TableState]], since: str
) -> tuple[LeftOut, ...]:
    """Raise AppendOnlyChangedError if rows of an append-only table were updated or deleted after `states` (by shard).

    Returns a warning for each table whose counters can't be compared. `since` describes the time of these states in
    messages.
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
    counted = [(state, state.counted) for state in states if state.counted]
    return {state.oid: state.table for state, _ in counted}, {state.table: counters for state, counters in counted}


def states_to_compare(plan: DdlPlan, known: KnownTables) -> dict[str, dict[str, TableState]]:
    """Return the states of append-only tables to compare counters with, by shard and current table name.

    The states come from the previous commit; for tables that are copied again, they come from the plan, which is made
    before the copy. This requires that no row has been updated or deleted since then.
    """
    states: dict[str, dict[str, TableState]] = {}
    for shard, one in plan.shards.items():
        before = {state.oid: state for state in known.states[shard].values() if state.counted}
        before |= {table.oid: one.states[table.group.name] for table in one.to_copy}
        states[shard] = {
            name: structs.replace(before[state.oid], table=name)
            for name, state in one.states.items()
            if state.oid in before
        }
    return states


def last_commit_label(chain: Chain) -> str:
    """Return the name that messages use for the chain's last commit."""
    return point_label(chain.last.increment)


def with_warnings(
    left_out: Iterable[LeftOut],
    chain: Chain,
    warnings: Iterable[LeftOut],
    shards: Container[str],
    copied: Collection[tuple[str, str]] = (),
) -> tuple[LeftOut, ...]:
    """Add to `left_out` the new `warnings` and those from the chain's previous commits about these shards.

    A warning about a table holds for all later commits until the table is copied again; `copied` names such tables by
    node and name.
    """
    kind = LeftOutKind.UNCOUNTED_TABLE
    earlier = (out for out in chain.left_out if out.kind == kind and out.node in shards)
    before = [out for out in earlier if (out.node, out.name) not in copied]
    return tuple(dict.fromkeys((*left_out, *before, *warnings)))
