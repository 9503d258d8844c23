"""Taking an increment: check that the chain can go on, make a cut, commit.

The archive is all that is written before the commit. An attempt that dies leaves segments that the next one
begins with, and a slot that stands where the archive ends or before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.baseline import check_baseline
from fleet.config import Fleet, Node
from fleet.groups import Group, GroupRules, read_tables
from fleet.progress import Progress
from fleet.publications import check_published, publication_names
from fleet.sessions import Sessions, locked_fleet, open_sessions
from snapshots.commits import publish, read_chain
from snapshots.counting import counts_of
from snapshots.create import CreateRequest
from snapshots.cutting import Before, CutPlan, make_cut
from snapshots.jobs import SparkSource
from snapshots.manifest import Chain, Commit
from snapshots.operations import new_operation, recorded
from snapshots.schema import read_sequences
from snapshots.settle import settle_operations
from snapshots.store_identity import read_identity
from storage.errors import RefusedError
from storage.open import open_store
from storage.store import ObjectStore
from wal.decoding import SchemaChangedError
from wal.drain import DrainTask
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
        settle_operations(store, fleet, progress)
        # Read under the lock: nobody adds an increment to it now.
        chain = read_chain(store, request.name)
        continuing = Continuing(fleet, request, store, sessions, chain)
        check_continuable(continuing)
        number = chain.last.increment + 1
        operation = new_operation("create", request.name, number, tuple(node.id for node in nodes))
        with recorded(store, operation):
            made = make_cut(sessions, _cut_plan(continuing, operation.id), spark, store, progress)
            progress.step("commit")
            commit = Commit(
                snapshot=request.name,
                increment=number,
                operation=operation.id,
                chain=chain.full.operation,
                created_at=operation.began_at,
                seconds=time.monotonic() - began,
                cut=made.record,
                segments=made.segments,
                sequences={node: read_sequences(c) for node, c in sessions.primaries.items()},
                counts=counts_of(nodes, made),
                comment=request.comment,
            )
            publish(store, commit)
            return commit


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
        check_schema(node, chain.groups(node), {t.group.name: t.group for t in read_tables(connection, ALL_TABLES)})
        check_published(connection, node, chain.part.fleet_id, names)
    slot = slot_name(chain.full.operation)
    for node in sessions.nodes:
        # Segments that no commit lists yet lie between; the drain takes them into account and checks again.
        state = slot_state(sessions.connections[node.id], slot)
        archived = _archived(continuing, node.id)
        check_slot(node.id, slot, state, archived)
    check_objects(continuing.store, chain)


ALL_TABLES = GroupRules(append_only=("*",))


def _archived(continuing: Continuing, node: str) -> int:
    segments = continuing.chain.segments(node)
    listed = segments[-1].range.through if segments else continuing.chain.part.base[node]
    state = slot_state(continuing.sessions.connections[node], slot_name(continuing.chain.full.operation))
    # A slot ahead of the commits is sound if the archive is too, which only reading it can tell.
    return max(listed, state.confirmed) if state else listed


def check_schema(node: str, groups: tuple[Group, ...], now: Mapping[str, Group]) -> None:
    """Raise SchemaChangedError naming the first group that is not as it was at the full snapshot."""
    for group in groups:
        found = now.get(group.name)
        if found is None or _defined(found) != _defined(group):
            what = "is gone" if found is None else "is not as it was at the full snapshot"
            raise SchemaChangedError(
                f"node {node}: table {group.name} {what}",
                hint="take a new full snapshot: snapshot create NAME",
                details={"node": node, "group": group.name},
            )


def _defined(group: Group) -> dict[str, object]:
    return group.definition()


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


def _cut_plan(continuing: Continuing, operation: str) -> CutPlan:
    chain, fleet = continuing.chain, continuing.fleet
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=slot_name(chain.full.operation),
            publications=publication_names(chain.part.fleet_id),
            snapshot=chain.name,
            chain=chain.full.operation,
            operation=operation,
            groups={group.name: group for group in chain.groups(node.id)},
            global_id_form=fleet.global_id,
            base=chain.part.base[node.id],
            known=chain.segments(node.id),
            finish=0,
            store_url=fleet.store_url,
            store_options=fleet.store_options,
        )
        for node in continuing.sessions.nodes
    }
    cuts = chain.last.cut.cut.nodes
    before = {node: Before(cut.position, cut.undecided) for node, cut in cuts.items()}
    return CutPlan(chain.full.operation, operation, tasks, before, continuing.request.retries)
