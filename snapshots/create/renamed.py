"""Recognise nodes to which fleet.toml gives other ids than before, by their system identifiers and database oids.

The chain continues with the ids that it knows (fleet/chain_ids.py), and nothing is copied again: archive and slot are
those of the same database. A standby has the identity of its primary, so one with a new id is recognised by the chain's
slot on its server. If it is taken for another standby of its shard, its slot does not fit, and it is copied again.

An identity that two databases share, as after a server was cloned, recognises nothing; then the id counts. Ids that
are exchanged, or given to another database, are refused: rows of one shard must never get under the name of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import psycopg

from cutline.fleet.chain_ids import in_listed_ids, renamed_nodes, with_chain_ids
from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.progress import News, Progress
from cutline.nodes.baseline import FleetTopologyError, NodeIdentity
from cutline.nodes.connections import NodeUnreachableError, connect, raising_unreachable
from cutline.nodes.sessions import Sessions, ask_identities
from cutline.snapshots.create.absent_copies import joining_primaries
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.proven_chains import read_continued
from cutline.storage.errors import ChainEnd
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import slot_name, slot_state

# Whether a node has the chain's slot; None if it can't be asked.
HasSlot = Callable[[Node], bool | None]


class NodesRenamedError(Exception):
    """The sessions' nodes have other ids in the chain: they must be opened again, for `fleet`. Never shown."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__("nodes have other ids in the chain")
        self.fleet = fleet


def find_renamed(
    fleet: Fleet,
    chain: Chain,
    identities: Mapping[str, NodeIdentity],
    has_slot: HasSlot,
    replaced: Collection[str] = (),
) -> dict[str, str]:
    """Return the ids in fleet.toml of the nodes that the chain knows by others, by the chain's ids.

    `fleet` has the ids of the file, and `identities` are by these ids, those of primaries as far as they are known.
    Those of `replaced` shards don't count (CreateRequest). Shards that are `retired` in the file are not recognised:
    the file says that they are gone. Names that the last commit records stay, unless they are used otherwise now.

    Raises FleetTopologyError if an id belongs to another node of the chain.
    """
    recorded = with_chain_ids(fleet, chain.renamed)
    known = {node.listed_id: node.id for node in recorded.nodes if node.id in chain.parts}
    ids = _ids_of_shards(fleet, chain, identities, known, {*recorded.retired}, replaced)
    for shard, listed in list(ids.items()):
        if listed != shard and listed in chain.all_nodes:
            raise _exchanged_error(chain, shard, listed, fleet)
        ids |= _ids_of_standbys(fleet, chain, known, shard, listed, has_slot)
    used = {node.id for node in fleet.nodes}
    found = {one: listed for one, listed in ids.items() if one != listed}
    left = {one: name for one, name in chain.renamed.items() if one not in ids}
    # A shard that was retired does not come back, whichever of its ids the file lists.
    return found | {one: name for one, name in left.items() if name not in used or chain.shard_of(one) in chain.retired}


def _ids_of_shards(
    fleet: Fleet,
    chain: Chain,
    identities: Mapping[str, NodeIdentity],
    known: Mapping[str, str],
    retired: Collection[str],
    replaced: Collection[str],
) -> dict[str, str]:
    """Return the ids in the file of the chain's shards; `known` has the chain's ids, as recorded, by those."""
    shards: dict[tuple[str, int], list[str]] = {}
    for one in (one for one in chain.primaries if one not in retired):
        shards.setdefault(_database(chain.baseline[one]), []).append(one)
    listed: dict[tuple[str, int], list[str]] = {}
    for node in fleet.primaries:
        if node.id in identities and node.id not in replaced and known.get(node.id) not in replaced:
            listed.setdefault(_database(identities[node.id]), []).append(node.id)
    ids = {
        shards[database][0]: nodes[0]
        for database, nodes in listed.items()
        if len(nodes) == len(shards.get(database, ())) == 1
    }
    recognised = {*ids.values()}
    for node in fleet.primaries:
        if node.id not in recognised and node.id in known:
            if (shard := known[node.id]) in ids:
                raise _taken_error(shard, ids[shard], node.id)
            ids[shard] = node.id
    return ids


def _database(identity: NodeIdentity) -> tuple[str, int]:
    return identity.system_identifier, identity.database_oid


def _ids_of_standbys(
    fleet: Fleet, chain: Chain, known: Mapping[str, str], shard: str, listed: str, has_slot: HasSlot
) -> dict[str, str]:
    standbys = [node for node, primary in chain.parts.items() if primary == shard]
    own = [node for node in fleet.nodes if node.backup_of == listed]
    ids = {known[node.id]: node.id for node in own if known.get(node.id) in standbys}
    left = [node for node in standbys if node not in ids]
    new = [node for node in own if node.id not in known and node.id not in chain.all_nodes] if left else []
    slots = {node.id: has_slot(node) for node in new}
    likely = [node for node in slots if slots[node]]
    if known.get(listed) != shard:
        # The shard itself has a new id, so the standbys that can't be asked probably have one, too.
        likely += [node for node in slots if slots[node] is None]
    return ids | dict(zip(left, likely, strict=False))


def _exchanged_error(chain: Chain, shard: str, listed: str, fleet: Fleet) -> FleetTopologyError:
    is_shard = listed in chain.primaries or listed in chain.retired
    again = ""
    if listed in chain.primaries:
        other = f" --replaced {shard}" if any(node.id == shard for node in fleet.primaries) else ""
        again = (
            f"; or copy them again under their new ids: snapshot create {chain.name} --incremental --replaced"
            f" {listed}{other}"
        )
    return FleetTopologyError(
        f"node {listed}: its server and database are those of {shard}, and the chain has another"
        f" {'shard' if is_shard else 'standby'} with the id {listed}",
        hint=[
            "if the dsn is wrong, correct it in fleet.toml; if ids were exchanged, give each of these shards its old id"
            f" or one that the chain does not have{again}",
            f"or {NEW_CHAIN}",
        ],
        ends_chain=ChainEnd.PERHAPS,
        details={"node": listed, "known": shard},
    )


def _taken_error(shard: str, renamed: str, node: str) -> FleetTopologyError:
    return FleetTopologyError(
        f"node {node}: it has the id of a shard of the chain that is called {renamed} now",
        hint=f"give {node} an id that the chain does not have; or {NEW_CHAIN}",
        ends_chain=ChainEnd.PERHAPS,
        details={"node": node, "known": shard},
    )


def ask_renamed(fleet: Fleet, chain: Chain, replaced: Collection[str] = ()) -> dict[str, str]:
    """Ask the servers in fleet.toml, and return find_renamed. The fleet has the ids of the file.

    Raises NodeUnreachableError if no server of a shard that the chain does not know can be reached.
    The database of a shard whose primary can't be reached is identified on a standby, which may have been promoted.
    """
    answers = ask_identities(fleet.nodes)
    recorded = with_chain_ids(fleet, chain.renamed)
    if away := [
        node.listed_id
        for node in joining_primaries(recorded, chain)
        if not any(one.listed_id in answers for one in recorded.nodes if one.shard == node.id)
    ]:
        raise NodeUnreachableError(
            f"node {away[0]}: it can't be reached, and may be a shard of the chain that fleet.toml lacks:"
            f" {', '.join(missing_shards(recorded, chain))}",
            hint="repeat the command when the server is back: it is recognised by its system identifier",
            details={"node": away[0], "nodes": away},
        )
    identities = {
        shard.id: answers[node.id]
        for shard in fleet.primaries
        for node in reversed(fleet.nodes)
        if node.shard == shard.id and node.id in answers
    }
    identities |= {shard.id: answers[shard.id] for shard in fleet.primaries if shard.id in answers}
    slot = slot_name(chain.stored_full.operation)

    def has_slot(node: Node) -> bool | None:
        try:
            with raising_unreachable(node), connect(replace(node, server=None)) as connection:
                return slot_state(connection, slot) is not None
        except NodeUnreachableError:
            return None

    return find_renamed(fleet, chain, identities, has_slot, replaced)


def find_renamed_of(sessions: Sessions, fleet: Fleet, chain: Chain, replaced: Collection[str] = ()) -> dict[str, str]:
    """Return find_renamed for a command's sessions; `fleet` has the ids of the file."""
    nodes = in_listed_ids(sessions.fleet)
    identities = {
        listed: sessions.identities[node.id] for listed, node in nodes.items() if node.id in sessions.identities
    }
    slot = slot_name(chain.stored_full.operation)

    def has_slot(node: Node) -> bool | None:
        connection: psycopg.Connection[object] | None = sessions.connections.get(nodes[node.id].id)
        if connection is None:
            return None
        with raising_unreachable(node):
            return slot_state(connection, slot) is not None

    return find_renamed(fleet, chain, identities, has_slot, replaced)


def in_chain_ids(store: ObjectStore, fleet: Fleet, full: FullSnapshot, replaced: Collection[str]) -> Fleet:
    """Return the fleet with the chain's ids, as far as fleet.toml, the commits and new nodes show them.

    Nodes are asked only if fleet.toml lacks shards of the chain, and no commit records their ids. The increments are
    read only if fleet.toml has other nodes than the full snapshot. Raises NodeUnreachableError if a shard that may be
    one of these can't be reached, and the errors of find_renamed.
    """
    if not missing_shards(fleet, Chain(full)) and {node.id for node in fleet.nodes} <= full.parts.keys():
        return fleet
    chain = read_continued(store, full.snapshot, full)
    recorded = with_chain_ids(fleet, chain.renamed)
    if not missing_shards(recorded, chain):
        return recorded
    return with_chain_ids(fleet, ask_renamed(fleet, chain, replaced))


def missing_shards(fleet: Fleet, chain: Chain) -> list[str]:
    """Return the shards of the chain that the fleet lacks, and does not name as retired."""
    return [shard for shard in chain.primaries if shard not in {node.id for node in fleet.nodes} | {*fleet.retired}]


def check_chain_ids(sessions: Sessions, fleet: Fleet, listed: Fleet, chain: Chain, replaced: Collection[str]) -> None:
    """Raise NodesRenamedError if the nodes of the sessions have other ids in the chain than in `fleet`.

    `listed` is the fleet with the ids of fleet.toml. Raises the errors of find_renamed.
    """
    found = with_chain_ids(listed, find_renamed_of(sessions, listed, chain, replaced))
    if renamed_nodes(found) != renamed_nodes(fleet):
        raise NodesRenamedError(found)


def note_renamed(fleet: Fleet, chain: Chain, progress: Progress) -> None:
    """Note the ids that fleet.toml has changed since the last commit; `fleet` has the chain's ids."""
    now = renamed_nodes(fleet)
    for known, listed in now.items():
        if chain.renamed.get(known) != listed:
            progress.note(News(f"{known} is called {listed} in fleet.toml now: the chain still calls it {known}"))
    for known, listed in chain.renamed.items():
        if known not in now and any(node.id == known for node in fleet.nodes):
            progress.note(News(f"{listed} is called {known} in fleet.toml again"))
