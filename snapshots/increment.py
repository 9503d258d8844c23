"""Taking an increment: every check before anything is changed; `snapshots.incremental` does the work after that.

Nothing here needs Arrow or Spark, as in `snapshots.create`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.baseline import check_baseline
from fleet.config import Fleet, Node
from fleet.groups import Group, SchemaChangedError, Table, read_tables
from fleet.lock import locked_fleet
from fleet.progress import Progress
from fleet.publications import check_published
from fleet.sessions import Sessions, open_sessions
from snapshots.commits import read_chain
from snapshots.create import CreateRequest
from snapshots.jobs import SparkSource
from snapshots.lost import check_not_lost
from snapshots.manifest import Chain, Commit
from snapshots.operations import new_operation, recorded
from snapshots.points import Point
from snapshots.retained import foresee, guard_nodes
from snapshots.settle import settle_operations
from snapshots.store_identity import read_identity
from storage.errors import RefusedError
from storage.open import open_store
from storage.store import ObjectStore
from wal.slots import check_slot, slot_name, slot_state


class ChainObjectMissingError(RefusedError):
    """An object that the chain needs is gone from the store."""


class GlobalIdRuleChangedError(RefusedError):
    """fleet.toml's [cut] global_id is not the one that the chain was begun with."""


@dataclass(frozen=True, slots=True)
class Continuing:
    """One increment under way."""

    fleet: Fleet
    request: CreateRequest
    store: ObjectStore
    sessions: Sessions
    chain: Chain


def create_increment(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the next increment of the snapshot and return its commit."""
    began = time.monotonic()
    progress.step("check the chain")
    store = open_store(fleet.store_url, fleet.store_options)
    read_identity(store, fleet)
    nodes = chain_nodes(fleet, read_chain(store, request.name, 0))
    with open_sessions(fleet, nodes) as sessions, locked_fleet(sessions, fleet.name):
        progress.reached(Point.LOCKED)
        settle_operations(store, fleet, progress)
        progress.reached(Point.SETTLED)
        # Read under the lock: nobody adds an increment to it now.
        chain = read_chain(store, request.name)
        continuing = Continuing(fleet, request, store, sessions, chain)
        guard_nodes(store, sessions, progress)
        progress.reached(Point.GIVEN_UP)
        check_not_lost(store, chain)
        check_continuable(continuing)
        progress.reached(Point.CHECKED)
        number = chain.last.increment + 1
        operation = new_operation("create", request.name, number, tuple(node.id for node in nodes))
        spark.begin()
        progress.reached(Point.SPARK_BEGUN)
        from snapshots.incremental import take_increment

        with recorded(store, operation):
            commit = take_increment(continuing, operation, spark, progress, began)
        progress.reached(Point.OUTCOME_STORED)
    progress.reached(Point.RELEASED)
    return commit


def estimate_increment(fleet: Fleet, request: CreateRequest, progress: Progress) -> dict[str, int]:
    """Make every check of an increment and return the bytes of WAL that each node would have decoded."""
    progress.step("check the chain")
    store = open_store(fleet.store_url, fleet.store_options)
    read_identity(store, fleet)
    chain = read_chain(store, request.name)
    with open_sessions(fleet, chain_nodes(fleet, chain)) as sessions:
        check_not_lost(store, chain)
        foresee(store, sessions, chain.full.chain, progress)
        check_continuable(Continuing(fleet, request, store, sessions, chain))
        slot = slot_name(chain.full.operation)
        return {node: _waiting_bytes(connection, slot) for node, connection in sessions.connections.items()}


def _waiting_bytes(connection: psycopg.Connection[Any], slot: str) -> int:
    query = """
        SELECT pg_wal_lsn_diff(
            CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
            confirmed_flush_lsn)::bigint
          FROM pg_replication_slots WHERE slot_name = %s
        """
    (waiting,) = connection.execute(query, (slot,)).fetchone() or (0,)
    return max(int(waiting), 0)


def chain_nodes(fleet: Fleet, chain: Chain) -> tuple[Node, ...]:
    """fleet.toml's nodes that the chain has copies of; a node that is missing there changed the baseline."""
    known = {identity.node for identity in chain.nodes}
    only_primaries = all(identity.backup_of is None for identity in chain.nodes)
    nodes = fleet.primaries if only_primaries else fleet.nodes
    if known != {node.id for node in nodes}:
        check_baseline(chain.part.baseline, {n: i for n, i in chain.part.baseline.items() if n in _ids(nodes)})
    return nodes


def _ids(nodes: tuple[Node, ...]) -> set[str]:
    return {node.id for node in nodes}


def check_continuable(continuing: Continuing) -> None:
    """Raise unless the chain can go on: baseline, schema, publications, slots, archive and objects."""
    chain, sessions, fleet = continuing.chain, continuing.sessions, continuing.fleet
    check_baseline(chain.part.baseline, sessions.identities)
    if chain.part.global_id_form != fleet.global_id:
        raise GlobalIdRuleChangedError(
            f"[cut] global_id was {chain.part.global_id_form!r} at the full snapshot and is {fleet.global_id!r}",
            hint="set it back, or take a new full snapshot: snapshot create NAME",
        )
    chain.check_archive()
    for node, connection in sessions.primaries.items():
        names = [group.name for group in chain.groups(node)]
        check_schema(node, chain.groups(node), read_tables(connection, chain.part.rules))
        check_published(connection, node, chain.part.fleet_id, names)
    slot = slot_name(chain.full.operation)
    for copy in sessions.nodes:
        _check_slot(continuing, copy.id, slot)
    check_objects(continuing.store, chain)


def _check_slot(continuing: Continuing, node: str, slot: str) -> None:
    state = slot_state(continuing.sessions.connections[node], slot)
    segments = continuing.chain.segments(node)
    listed = segments[-1].range.through if segments else continuing.chain.part.base[node]
    # A slot ahead of the commits is sound if uncommitted segments are too; the drain reads those, and checks.
    check_slot(node, slot, state, max(listed, state.confirmed if state else 0))


def check_schema(node: str, groups: tuple[Group, ...], tables: list[Table]) -> None:
    """Raise SchemaChangedError naming the first table that is new, gone, or not as it was at the full snapshot."""
    now = {table.group.name: table.group for table in tables}
    was = {group.name: group for group in groups}
    for name in sorted(was.keys() | now.keys()):
        if name not in was:
            what = "is new since the full snapshot"
        elif name not in now:
            what = "is gone since the full snapshot"
        elif was[name].definition() != now[name].definition():
            what = "is not as it was at the full snapshot"
        else:
            continue
        raise SchemaChangedError(
            f"node {node}: table {name} {what}",
            hint="take a new full snapshot: snapshot create NAME",
            details={"node": node, "group": name},
        )


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
                    hint=f"run: snapshot check {chain.name}   then take a new full snapshot: snapshot create NAME",
                    details={"object": key, "increment": commit.increment},
                )
