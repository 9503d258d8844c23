"""Whether a chain can go on: everything that would lose changes, or make them impossible to restore, is refused.

In this order, so that the first refusal is the one that tells most and costs least: fleet.toml, what the nodes are,
whether they decode at all, the slots, the tables, the objects in the store. Nothing here is changed, and nothing
needs Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleet.baseline import BaselineChangedError, check_baseline, check_presence
from fleet.config import Fleet, GroupRules, Node
from fleet.connections import answering
from fleet.hints import NEW_CHAIN
from fleet.lsn import lsn_from_text, lsn_to_text
from fleet.preconditions import check_decoding
from fleet.sessions import Sessions, in_parallel
from snapshots.chain import Chain
from snapshots.commits import commit_gone
from snapshots.counted import check_counted, counted_states, since_of
from snapshots.create import CreateRequest
from snapshots.operations import recorded_commits
from snapshots.schema_changes import Catalogs, SchemaPlan, known_of, plan_schema, read_all
from storage.errors import RefusedError
from storage.store import ObjectMissingError, ObjectStore
from wal.archive import archive_prefix, segment_key
from wal.slots import check_slot, slot_name, slot_state

PLACE_QUERY = """
SELECT CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_flush_lsn()::text END
"""


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


def check_described(fleet: Fleet, chain: Chain) -> tuple[Node, ...]:
    """The nodes that the chain has copies of; raise unless fleet.toml describes the fleet that the chain is of."""
    nodes = check_presence(chain.part.baseline, fleet, {(one.node, one.name) for one in chain.too_old})
    if chain.part.global_id_form != fleet.global_id:
        raise GlobalIdRuleChangedError(
            f"[cut] global_id was {chain.part.global_id_form!r} at the full snapshot and is {fleet.global_id!r}",
            hint=f"set it back in fleet.toml, or {NEW_CHAIN}",
        )
    return nodes


def rules_since(chain: Chain, fleet: Fleet) -> GroupRules:
    """The rules that an increment follows: the full snapshot's, and what fleet.toml has come to exclude or admit since.

    A table that it would include again stays out of the chain: what is stored of it before is no more.
    """
    then, now = chain.part.rules, fleet.groups
    exclude, append_only = (
        (*one, *other) for one, other in ((then.exclude, now.exclude), (then.append_only, now.append_only))
    )
    return replace(then, exclude=tuple(dict.fromkeys(exclude)), append_only=tuple(dict.fromkeys(append_only)))


def check_commits(store: ObjectStore, chain: Chain) -> None:
    """Raise SnapshotMissingError if an increment after the chain's last was committed, and its commit file is gone.

    Going on without it would give its number to another state, while somebody may hold the first for committed.
    """
    recorded = recorded_commits(store, chain.last.operation).get(chain.name, {})
    if lost := sorted(number for number in recorded.values() if number > chain.last.increment):
        raise commit_gone(chain.name, lost[0])


def check_continuable(continuing: Continuing) -> dict[str, Catalogs]:
    """Raise unless the chain can go on: commits, baseline, settings, slots, archive, tables, publications, objects.

    Returns the primaries' catalogs.
    """
    chain, sessions = continuing.chain, continuing.sessions
    check_described(continuing.fleet, chain)
    check_commits(continuing.store, chain)
    check_baseline(chain.part.baseline, sessions.identities)
    check_decoding(sessions)
    in_parallel(lambda node: _check_node(continuing, node), sessions.nodes)
    chain.check_archive()
    catalogs = read_all(sessions, (chain.part.fleet_id, rules_since(chain, continuing.fleet)))
    check_counted(sessions, counted_states(plan_next(chain, catalogs), known_of(chain)), since_of(chain))
    check_objects(continuing.store, chain)
    return catalogs


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
    number = len(chain.segments(node))
    while store.exists(segment_key(prefix, number + 1)):
        number += 1
    if number == len(chain.segments(node)):
        return listed
    # Rare, and the only place where a check needs Arrow.
    from wal.segments import read_metadata

    return read_metadata(store, segment_key(prefix, number), number).range.through


def plan_next(chain: Chain, catalogs: Mapping[str, Catalogs]) -> SchemaPlan:
    """What the next increment would do with the tables; raise PublicationChangedError if it can't carry them."""
    return plan_schema(catalogs, known_of(chain), {}, {})


def check_objects(store: ObjectStore, chain: Chain) -> None:
    """Raise ChainObjectMissingError unless every object that the chain lists is there, in its size."""
    folders = [f"snapshots/{chain.name}/{part}" for part in ("base", "wal", "schema")]
    sizes = {one.key: one.size for folder in folders for one in store.inventory(folder)}
    for commit in chain.commits:
        for key, size in commit.object_sizes.items():
            # A listing may be of a moment ago: what it does not show as it must be is asked for by its key.
            if sizes.get(key) != size and (problem := listed_problem(store, key, size)):
                what = f"increment {commit.increment}" if commit.increment else "the full snapshot"
                raise ChainObjectMissingError(
                    f"object {key} of {what} {problem}",
                    hint=f"put it back from a copy of the store; or {NEW_CHAIN}   (what else is missing:"
                    f" snapshot check {chain.name})",
                    details={"object": key, "increment": commit.increment},
                )


def listed_problem(store: ObjectStore, key: str, size: int) -> str | None:
    """What is wrong with an object of which presence and size alone are looked at; None if nothing."""
    try:
        found = store.size(key)
    except ObjectMissingError:
        return "is gone from the store"
    return None if found == size else f"has {found} bytes instead of {size}"
