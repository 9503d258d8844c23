"""Check that a chain can be continued: refuse anything that would lose changes or make them impossible to restore.

The checks are ordered to make the first refusal the cheapest and most informative: fleet.toml, the nodes' identities,
logical decoding, slots, tables, the objects in the store. No check changes anything or needs Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Set
from contextlib import suppress
from functools import partial
from types import MappingProxyType

from msgspec import Struct, field, structs

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import NEW_CHAIN, without_node
from cutline.fleet.timeline_history import TimelineHistory
from cutline.fleet.units import size_text
from cutline.nodes.baseline import BaselineChangedError, FleetTopologyError, check_baseline, check_presence
from cutline.nodes.connections import NodeUnreachableError, raising_unreachable
from cutline.nodes.left_out import LeftOut
from cutline.nodes.preconditions import find_fillings, find_undecodable_nodes
from cutline.nodes.privileges import find_table_problems
from cutline.nodes.problems import NodeUnfitError, refuse_unfit
from cutline.nodes.publications import PublicationChangedError, check_exists, publication_names
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.snapshots.create.absent_copies import (
    ENDING,
    find_renewable,
    joining_primaries,
    joining_standbys,
    leave_out,
)
from cutline.snapshots.create.background_copies import UnderwayCopy, find_underway, with_underway
from cutline.snapshots.create.chain_objects import check_objects
from cutline.snapshots.create.context import ChainState, state_of
from cutline.snapshots.create.counters import check_append_only, last_commit_label, states_to_compare
from cutline.snapshots.create.readers import choose_readers
from cutline.snapshots.ddl.table_changes import (
    DdlPlan,
    TableSelection,
    known_tables,
    plan_ddl,
    read_tables_since_commit,
)
from cutline.snapshots.operations.old_primaries import check_not_replaced
from cutline.snapshots.operations.open_operations import read_recorded_commits
from cutline.snapshots.operations.slot_guard import how_to_free_slots
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import commit_missing_error
from cutline.storage.errors import ChainEnd, RefusedError, SnapshotError, UsageError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lineage import agreed_position, check_archived_history, check_histories, diverged_error
from cutline.wal.drain.slots import (
    ADVANCED,
    POSITION,
    SlotLostError,
    check_slot,
    count_free_slots,
    no_free_slot_error,
    slot_name,
    slot_state,
)
from cutline.wal.segments.archive import ArchivedSegment, ArchiveError, archive_prefix, last_number, segment_key

POSITION_QUERY = f"SELECT ({POSITION})::text"
PLACE_QUERY = """
SELECT CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_flush_lsn()::text END
"""


class GlobalIdRuleChangedError(RefusedError):
    """fleet.toml's [cut] global_id differs from the one in the chain's full snapshot."""


def check_fleet_file(fleet: Fleet, chain: Chain) -> tuple[Node, ...]:
    """Return the nodes of the chain, and those that may join it; raise an error if fleet.toml does not match."""
    joining = (*joining_primaries(fleet, chain), *joining_standbys(fleet, chain))
    if back := [node.id for node in joining if node.id in chain.retired]:
        raise FleetTopologyError(
            f"node {back[0]}: the chain had a shard with this id, which was retired with increment"
            f" {chain.retired[back[0]]}",
            hint=f"give the new node another id in fleet.toml; or {NEW_CHAIN}",
            ends_chain=ChainEnd.PERHAPS,
            details={"node": back[0]},
        )
    nodes = (*check_presence(chain.baseline, fleet), *joining)
    if chain.full.global_id_form != fleet.global_id:
        raise GlobalIdRuleChangedError(
            f"[cut] global_id was {chain.full.global_id_form!r} at the full snapshot and is now {fleet.global_id!r}",
            hint=f"change it back in fleet.toml, or {NEW_CHAIN}",
            ends_chain=ChainEnd.PERHAPS,
        )
    return nodes


def rules_since(chain: Chain, fleet: Fleet) -> GroupRules:
    """Return an increment's rules: the full snapshot's, plus any that fleet.toml now adds to exclude and append_only.

    A table that the full snapshot excluded stays out of the chain even if fleet.toml now includes it.
    """
    then, now = chain.full.rules, fleet.groups
    exclude, append_only = (
        (*one, *other) for one, other in ((then.exclude, now.exclude), (then.append_only, now.append_only))
    )
    return structs.replace(then, exclude=tuple(dict.fromkeys(exclude)), append_only=tuple(dict.fromkeys(append_only)))


def check_commits(store: ObjectStore, chain: Chain, documents: Mapping[str, Set[str]] | None = None) -> None:
    """Raise SnapshotMissingError if an increment after the chain's last was committed but its commit file is gone.

    Continuing would reuse the number of an increment that was reported as committed.
    """
    recorded = read_recorded_commits(store, chain.last.operation, documents=documents).get(chain.name, {})
    if lost := sorted(number for number in recorded.values() if number > chain.last.increment):
        raise commit_missing_error(chain.name, lost[0])


class Continuable(Struct, frozen=True):
    """A chain that can be continued: its state, and the next increment's plan for the tables as they are now.

    `unknown` holds warnings about tables whose counters can't be compared. `to_renew` are the nodes whose copies can
    only restart, with the reason; `agreed` has the agreed_position of those that have lost WAL. `underway` are the
    copies that have restarted and are not part of the chain yet. `nodes` are all nodes of the chain, and those that
    may join it. `lack` is a warning about objects that earlier restore points lack, or "".
    """

    nodes: tuple[Node, ...]
    state: ChainState
    plan: DdlPlan
    unknown: tuple[LeftOut, ...]
    to_renew: Mapping[str, str]
    lack: str = ""
    agreed: Mapping[str, Lsn] = field(default_factory=dict)
    underway: Mapping[str, UnderwayCopy] = field(default_factory=dict)


def check_continuable(
    store: ObjectStore,
    sessions: Sessions,
    chain: Chain,
    documents: Mapping[str, Set[str]] | None = None,
    replaced: Collection[str] = (),
    *,
    dropped: Mapping[str, str] = MappingProxyType({}),
    reads_archives: bool = True,
) -> Continuable:
    """Check commits, baseline, settings, slots, archive, tables, publications and objects; raise the first error.

    Standbys that can't take part are left out, unless fleet.toml requires them. The sessions are the ones on the nodes
    that `check_fleet_file` returned for the chain. `documents` is as in read_recorded_commits, `replaced` as in
    CreateRequest, and `reads_archives` as in find_underway. `dropped` says why this command has dropped the chain's
    slot on a node.
    """
    check_commits(store, chain, documents)
    sessions.read_histories()
    _check_replaced(sessions, chain, replaced)
    renewable = find_renewable(sessions, chain, replaced)
    underway, to_renew = find_underway(store, sessions, chain, renewable, reads_archives=reads_archives)
    ended = _check_nodes(store, sessions, chain, to_renew)
    for node, error in ended.items():
        has_dropped = node in dropped and isinstance(error, SlotLostError)
        to_renew[node] = dropped[node] if has_dropped else without_node(error.message, node)
    to_renew = {node: reason for node, reason in to_renew.items() if node not in underway}
    underway = {node: one for node, one in underway.items() if node not in sessions.absent}
    agreed = {node: position for node, error in ended.items() if (position := agreed_position(error)) is not None}
    chain.check_archive()
    rules = rules_since(chain, sessions.fleet)
    refuse_unfit(find_fillings(sessions) + find_table_problems(sessions, rules, chain.full.fleet_id))
    joining = [node.id for node in joining_primaries(sessions.fleet, chain)]
    _check_published(sessions, chain.full.fleet_id, to_renew)
    altered: set[str] = set()
    while True:
        try:
            # Another server may have the same fingerprint, if it was set up in the same way.
            known, seen = read_tables_since_commit(
                sessions,
                TableSelection(chain.full.fleet_id, rules),
                partial(known_tables, chain, joining, to_renew),
                {*joining, *to_renew},
                altered,
            )
            plan = plan_ddl(seen, known, {}, {})
            break
        except PublicationChangedError as error:
            shard = str(error.details["node"])
            if shard in altered:
                raise
            altered.add(shard)
            for node, reason in without_publication(sessions, error).items():
                to_renew.setdefault(node, reason)
                if underway.pop(node, None) is not None:
                    sessions.incomplete.discard(node)
    state = with_underway(state_of(chain, rules, known, seen), underway)
    unknown = check_append_only(sessions, states_to_compare(plan, state.known), last_commit_label(chain))
    lack = check_objects(store, chain)
    return Continuable(sessions.chosen, state, plan, unknown, to_renew, lack, agreed, underway)


def without_publication(sessions: Sessions, error: PublicationChangedError) -> dict[str, str]:
    """Return the nodes of the shard whose publication was altered, with the reason why their copies restart.

    The publication selects changes while WAL is decoded, as it was at that position: no slot can read again what was
    written meanwhile.
    """
    shard = str(error.details["node"])
    return {node.id: without_node(error.message, shard) for node in sessions.nodes if node.shard == shard}


def check_free_slots(sessions: Sessions, continuable: Continuable) -> None:
    """Raise NoFreeSlotError if a node lacks a free slot to copy tables; leave out such standbys, if not required.

    A copy of tables needs a slot besides that of the chain, and a copy that restarts needs the latter anew.
    """
    plan, to_renew, slot = continuable.plan, continuable.to_renew, slot_name(continuable.state.chain)
    copied = plan.to_copy.keys() | plan.unpublished.keys()

    def lacks(node: Node) -> bool:
        is_copied = node.shard in copied and node.id not in readers and node.id not in sessions.incomplete
        is_renewed, needed = node.id in to_renew, int(is_copied)
        with raising_unreachable(node):
            free = count_free_slots(sessions.connections[node.id], slot if is_renewed else "")
        return free < needed + is_renewed

    # The standbys first: without its reader, a primary needs a slot itself.
    for is_standby in (True, False):
        readers = choose_readers(sessions)
        concerned = [node for node in sessions.nodes if node.shard in copied or node.id in to_renew]
        nodes = [node for node in concerned if (node.backup_of is not None) == is_standby]
        for node, is_lacking in zip(nodes, in_parallel(lacks, nodes), strict=True):
            if is_lacking:
                connection, chain = sessions.connections[node.id], continuable.state.chain
                remedy = how_to_free_slots(sessions.fleet.store.open(), node, connection, chain)
                leave_out(sessions, node, no_free_slot_error(node, remedy), has_ended=node.id in to_renew)


def _check_published(sessions: Sessions, fleet_id: str, to_renew: Container[str]) -> None:
    """Raise PublicationChangedError if a primary that is copied has no publications, because `init` has not run there.

    A shard that was added and a database that was created again have none. That does not end the chain.
    """
    for node, connection in sessions.primaries.items():
        if node in to_renew:
            with raising_unreachable(sessions.fleet.node(node)):
                for name in publication_names(fleet_id):
                    check_exists(connection, node, name)


def _check_replaced(sessions: Sessions, chain: Chain, replaced: Collection[str]) -> None:
    """Raise UsageError unless the shards in `replaced` are in the chain, and have other servers or databases now."""
    for shard in replaced:
        was, now = chain.baseline.get(shard), sessions.identities.get(shard)
        if was is None or was.backup_of is not None or now is None:
            raise UsageError(
                f"--replaced names {shard}, which is no shard of the chain",
                hint=f"name one of: {', '.join(chain.primaries)}",
            )
        if (was.system_identifier, was.database_oid) == (now.system_identifier, now.database_oid):
            raise UsageError(
                f"--replaced names {shard}, but it was not replaced: the chain has a copy of this server and database",
                hint="correct its dsn in fleet.toml, or repeat the command without --replaced",
            )


def _check_nodes(
    store: ObjectStore, sessions: Sessions, chain: Chain, to_renew: Container[str]
) -> dict[str, SnapshotError]:
    """Check every node's identity, settings, WAL and slot; leave out standbys that fail.

    Returns the nodes, other than those in `to_renew`, whose copies can only restart, with the error that says why.
    """

    def check(node: Node) -> SnapshotError | None:
        try:
            if node.id in to_renew:
                refuse_unfit(unfit.get(node.id, ()))
                return None
            before, now = baseline[node.id], sessions.identities[node.id]
            # The database may have been renamed.
            name = now.database if now.database_oid == before.database_oid else before.database
            check_baseline({node.id: structs.replace(before, timeline=now.timeline, database=name)}, {node.id: now})
            refuse_unfit(unfit.get(node.id, ()))
            _check_history(store, sessions, chain, node, before.timeline)
            _check_node(store, sessions, chain, node)
        except (BaselineChangedError, NodeUnfitError, NodeUnreachableError, *ENDING) as error:
            return error
        return None

    unfit, nodes, baseline = find_undecodable_nodes(sessions), sessions.nodes, chain.baseline
    refuse_unfit(problem for node in nodes if not sessions.may_leave_out(node) for problem in unfit.get(node.id, ()))
    problems = dict(zip(nodes, in_parallel(check, nodes), strict=True))
    # The error of a primary matters more.
    ended: dict[str, SnapshotError] = {}
    for node in sorted(nodes, key=lambda node: node.backup_of is not None):
        if error := problems[node]:
            if isinstance(error, ENDING):
                ended[node.id] = error
            else:
                leave_out(sessions, node, error)
    return ended


def _check_history(store: ObjectStore, sessions: Sessions, chain: Chain, node: Node, timeline: int) -> None:
    """Raise WalDivergedError unless the history of the node's server has all WAL that the chain has of the node.

    `timeline` is that of the last commit. Segments that no commit lists are only read if the history has changed since:
    a drain verifies them in any case (wal/drain/drain.py), but then a cut has been made, and writes have ended if the
    snapshot is terminal. Raises NodeUnreachableError for a primary that may be the one before a failover.
    """
    was, now = TimelineHistory(timeline, chain.last.switches.get(node.id, {})), sessions.history(node)
    if node.backup_of is None and now.timeline < timeline:
        check_not_replaced(sessions, node, timeline, "at the last increment")
    segments = chain.newest_segments(node.id)
    listed = segments[-1].through if segments else chain.bases[node.id]
    check_histories(node.id, was, max(listed, chain.archived_to(node.id)), now)
    # The cut will be on the primary's timeline, even if a standby does not show it yet.
    if was != (coming := sessions.history(sessions.fleet.node(node.shard))):
        check_archived_history(node.id, _newest_unlisted(store, chain, node.id), coming)


def _check_node(store: ObjectStore, sessions: Sessions, chain: Chain, node: Node) -> None:
    """Check that the node's WAL and its slot continue where the archive ends."""
    slot, connection = slot_name(chain.full.operation), sessions.connections[node.id]
    with raising_unreachable(node):
        state = slot_state(connection, slot)
        (place,) = connection.execute(PLACE_QUERY).fetchone() or (None,)
    segments = chain.newest_segments(node.id)
    listed = segments[-1].through if segments else chain.bases[node.id]
    reached = max(listed, chain.archived_to(node.id))
    check_place(node, place, reached)
    if state is None or state.confirmed <= listed:
        check_slot(node.id, slot, state, listed, why_missing="" if state else _why_missing(sessions, node, reached))
        return
    end, how = _archive_end(store, chain, node.id, listed), ADVANCED
    if state.confirmed > end and (standby := _find_promoted_standby(store, sessions, chain, node, state.confirmed)):
        how = f"a command that failed during a failover had archived the WAL of standby {standby} up to there"
    check_slot(node.id, slot, state, end, how)


def _why_missing(sessions: Sessions, node: Node, archived: Lsn) -> str:
    """Say that another create may have dropped the slot if the node has more WAL than its limit; "" if it has not."""
    with raising_unreachable(node):
        (position,) = sessions.connections[node.id].execute(POSITION_QUERY).fetchone() or (None,)
    written, limit = Lsn.parse(position or str(ORIGIN)) - archived, node.retained_wal_bytes_max
    if written <= limit:
        return ""
    done = "written" if node.backup_of is None else "replayed"
    return (
        f"; since the last increment, the node has {done} {size_text(written)} of WAL, more than max_retained_wal"
        f" ({size_text(limit)}): a create of any snapshot may have dropped it"
    )


def _find_promoted_standby(store: ObjectStore, sessions: Sessions, chain: Chain, node: Node, position: Lsn) -> str:
    """Return a standby that may be the primary now and whose WAL is archived up to the position; "" if there is none.

    A command that fails in a failover may have archived WAL of a standby only, and so have advanced the slot of the
    server that is the primary now.
    """
    has_new_timeline = sessions.identities[node.id].timeline != chain.baseline[node.id].timeline
    if node.backup_of is not None or not has_new_timeline:
        return ""
    promoted = sessions.promoted.get(node.listed_id)
    for standby, primary in chain.parts.items():
        if primary == node.id and promoted in (None, chain.listed_id(standby)):
            segments = chain.newest_segments(standby)
            listed = segments[-1].through if segments else chain.bases[standby]
            # This only finds the cause: whether the standby's archive is damaged matters elsewhere.
            with suppress(ArchiveError):
                if _archive_end(store, chain, standby, listed) >= position:
                    return standby
    return ""


def check_place(node: Node, place: str | None, reached: Lsn) -> None:
    """Raise WalDivergedError if the WAL of a primary ends at `place` (PLACE_QUERY), before the end of its archive."""
    if place is not None and Lsn.parse(place) < reached:
        raise diverged_error(
            node.id,
            f"its WAL ends at {place}, before the end of the last cut at {reached}",
            {"was": str(reached), "now": place},
        )


def _archive_end(store: ObjectStore, chain: Chain, node: str, listed: Lsn) -> Lsn:
    """Return the end of the node's archive, including segments of failed attempts that no commit lists.

    Raises the errors of read_metadata.
    """
    newest = _newest_unlisted(store, chain, node)
    return newest.segment.through if newest else listed


def _newest_unlisted(store: ObjectStore, chain: Chain, node: str) -> ArchivedSegment | None:
    """Return the last segment of the node's archive if no commit lists it; raise the errors of read_metadata."""
    prefix = archive_prefix(chain.name, node, chain.archive(node))
    number = last = last_number(chain.newest_segments(node))
    while store.exists(segment_key(prefix, number + 1)):
        number += 1
    if number == last:
        return None
    # Imported here: this is rare, and the only check that needs Arrow.
    from cutline.wal.segments.segments import read_metadata

    return read_metadata(store, node, segment_key(prefix, number), number)
