"""The slots and publications that a removal drops on the nodes, and those that it can't reach.

Removals hold the fleet's lock meanwhile, except those from a copy of a store, whose chains have no slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

import psycopg
from msgspec import Struct

from cutline.fleet.config import Fleet
from cutline.fleet.messages import without_node
from cutline.fleet.progress import Progress
from cutline.nodes.clocks import check_clocks, note_clocks
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.lock import FleetLock
from cutline.nodes.publications import EventTriggerError, drop_publications
from cutline.nodes.server_errors import shorten_message
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.majority import read_recorded_servers
from cutline.snapshots.operations.operation import exclusive
from cutline.snapshots.operations.retired_nodes import with_retired
from cutline.snapshots.operations.settling import settle_operations, settle_removals
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import Intent, read_intent, read_outcome
from cutline.snapshots.records.store_identity import StoreIdentity, is_copy
from cutline.snapshots.records.tombstones import Mark
from cutline.snapshots.removal.survey import SurveyedSnapshot
from cutline.storage.errors import BusyError
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.drain.slots import drop_slots, list_own_slots, slot_name


class NodeCleanup(Protocol):
    """The actions that a removal takes on the nodes. The implementation holds the fleet's lock."""

    def check_held(self, operation: Intent) -> None:
        """Raise unless the fleet's lock is still held, so that no other command has settled the operation."""

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Drop a slot on `nodes`, which maps nodes to their system identifiers at the time when the slot was created.

        Return the nodes that did not answer, and the servers that fleet.toml no longer names.
        """

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Drop the publications on nodes that have no slot for which `is_ours` is true.

        Return the dropped and the remaining publications, as `name on node`.
        """


class OverdueError(BusyError):
    """The process was suspended for so long that another command may have settled its operation."""


def overdue_error(operation: Intent) -> OverdueError:
    """Return the error for a removal that another command has settled, or may have settled."""
    return OverdueError(
        f"operation {operation.id} was suspended for too long, and has removed nothing",
        hint="repeat the command",
        details={"snapshot": operation.snapshot, "operation": operation.id},
    )


class ChainSlots(Struct, frozen=True):
    """A snapshot's slots, the nodes that may have them, and its chain ("" if no commit can be read)."""

    slots: tuple[str, ...]
    nodes: tuple[str, ...]
    chain: str


def slots_of(store: ObjectStore, fleet: Fleet, surveyed: SurveyedSnapshot) -> ChainSlots:
    """Return the slots that the snapshot may have, and their nodes; none in a copy, which feeds no chain."""
    if is_copy(store):
        return ChainSlots((), (), surveyed.chain.full.chain if surveyed.chain else "")
    if surveyed.chain is not None:
        chain = surveyed.chain.full.chain
        return ChainSlots((slot_name(chain),), tuple(surveyed.chain.listed_system_identifiers), chain)
    # No commit can be read, so take the slots of every attempt under that name from the records of operations.
    slots: set[str] = set()
    nodes = {node.id for node in fleet.nodes}
    for operation_id in store.list_children("operations"):
        try:
            operation = read_intent(store, operation_id)
        except (ObjectMissingError, ManifestError):
            continue
        if (operation.kind, operation.snapshot, operation.increment) == ("create", surveyed.name, 0):
            slots.add(slot_name(operation_id))
            nodes |= set(operation.nodes)
    return ChainSlots(tuple(sorted(slots)), tuple(sorted(nodes)), "")


def slots_left_behind(store: ObjectStore, fleet: Fleet, mark: Mark) -> dict[str, str]:
    """Return the result of `servers_left_behind`, using only the store."""
    recorded: Mapping[str, str] = {}
    with suppress(ManifestError):
        recorded = read_recorded_servers(store)
    return servers_left_behind(fleet, mark.nodes_on_servers, recorded)


def servers_left_behind(fleet: Fleet, nodes: Mapping[str, str], primaries: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes of a chain whose servers fleet.toml no longer names, each with a name for the server.

    `nodes` are the former system identifiers of the nodes, "" if unknown; `primaries` are the current identifiers of
    the fleet's primaries. A standby has the identifier of its primary.
    """
    shards = {node.id: node.shard for node in (*fleet.nodes, *fleet.retired_nodes)}
    left: dict[str, str] = {}
    # A node may have another id now.
    new = Counter(primaries.get(shard, "") for node, shard in shards.items() if node not in nodes)
    for node, was in nodes.items():
        if node not in shards and was and new[was]:
            new[was] -= 1
        elif node not in shards:
            left[node] = node
        elif was and primaries.get(shards[node], was) != was:
            left[node] = f"the earlier server of {node}"
    return left


class NoNodes(Struct, frozen=True):
    """The NodeCleanup of a removal from a copy, whose chains have no slots.

    Nothing needs the fleet's lock there: two removals, or a removal and a copy, agree by the mark.
    """

    store: ObjectStore

    def check_held(self, operation: Intent) -> None:
        if read_outcome(self.store, operation.id) is not None:
            raise overdue_error(operation)

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:  # noqa: ARG002  # required by NodeCleanup
        return [], []

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:  # noqa: ARG002  # required by NodeCleanup
        return [], []


class FleetNodes(Struct, frozen=True):
    """The NodeCleanup that uses the sessions holding the fleet's lock."""

    lock: FleetLock
    fleet_id: str

    def check_held(self, operation: Intent) -> None:  # noqa: ARG002  # required by NodeCleanup
        self.lock.check_held()

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        sessions = self.lock.sessions
        primaries = {node: identity.system_identifier for node, identity in sessions.identities.items()}
        # A node may have another id now.
        servers = {*nodes.values()} - {""}
        left = drop_slots(
            [
                node
                for node in with_retired(sessions, nodes)
                if node.id in nodes or primaries.get(node.shard) in servers
            ],
            slot,
        )
        return left, list(servers_left_behind(sessions.fleet, nodes, primaries).values())

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        sessions = self.lock.sessions
        dropped: list[str] = []
        left: list[str] = []
        for node, connection in sessions.primaries.items():
            with raising_unreachable(sessions.fleet.node(node)):
                if any(map(is_ours, list_own_slots(connection))):
                    continue
                try:
                    dropped += [f"{name} on {node}" for name in drop_publications(connection, self.fleet_id)]
                except psycopg.errors.InsufficientPrivilege as error:
                    left.append(f"publications on {node}: {shorten_message(error)}")
                except EventTriggerError as error:
                    left.append(f"publications on {node}: {without_node(error.message, node)}")
        return dropped, left


@contextmanager
def hold_fleet(
    fleet: Fleet,
    store: ObjectStore,
    identity: StoreIdentity,
    command: tuple[str, str],
    progress: Progress,
    *,
    goes_by_age: bool = False,
) -> Iterator[NodeCleanup]:
    """Hold the fleet's lock for a command on a snapshot; settle operations that have died.

    If the store is a copy, no node is contacted, ages are by this machine's clock, and only removals are settled.
    Raises ClocksDifferError if the command `goes_by_age` and no clock can be trusted.
    """
    if identity.is_copy:
        settle_removals(store, progress)
        yield NoNodes(store)
        return
    progress.step("check nodes")
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, *command) as lock:
        (check_clocks if goes_by_age else note_clocks)(sessions.clocks, progress)
        settle_operations(store, sessions.fleet, progress)
        yield FleetNodes(lock, identity.fleet_id)
