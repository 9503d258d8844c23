"""Refuse the old primary of a shard while the server that was promoted in its place is away.

After a failover, the old primary may come back and accept writes, which nobody uses. Its timeline is an ancestor of
the promoted server's. A server that was restored to a point in time begins a later timeline, so it is not refused.
"""

from __future__ import annotations

from cutline.fleet.config import Node
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.nodes.baseline import FleetTopologyError
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.sessions import Sessions, ask_nodes, identify
from cutline.snapshots.operations.majority import RecordedPrimaries


def check_timelines(sessions: Sessions, recorded: RecordedPrimaries | None) -> None:
    """Raise the errors of check_not_replaced for primaries on earlier timelines than recorded; None records nothing."""
    if recorded is None:
        return
    listed = {node.listed_id: node for node in sessions.nodes if node.backup_of is None}
    found = {name: sessions.identities[node.id] for name, node in listed.items()}
    for name, was in recorded.known_timelines(found).items():
        if found[name].timeline < was:
            check_not_replaced(sessions, listed[name], was, "when a command last used it")


def check_not_replaced(sessions: Sessions, primary: Node, was: int, when: str) -> None:
    """Raise NodeUnreachableError if a standby is away that may have been promoted before: then this is the old primary.

    The primary's server was on the later timeline `was` then. A copy of the old primary would have the rows of a server
    that nobody uses. Raises FleetTopologyError if such a standby accepts writes, too. A standby whose dsn leads to the
    primary's server is away.
    """
    now = sessions.identities[primary.id].timeline
    # Also standbys that the command does not use.
    standbys = (node for node in sessions.fleet.nodes if node.backup_of == primary.id)
    absent = [node for node in standbys if node.id not in sessions.connections]
    if not absent:
        return
    itself = identify(primary, sessions.connections[primary.id])
    found = ask_nodes(absent)
    same = [node for node, answer in found.items() if answer.is_server_of(itself)]
    answered = {node: answer.identity for node, answer in found.items() if node not in same}
    why = f"node {primary.id}: its server is on timeline {now}, but was on {was} {when}: it may be the old primary from"
    for node, identity in answered.items():
        if not identity.in_recovery:
            raise FleetTopologyError(
                f"{why} before a failover to {node}: both accept writes",
                hint="find out which of the two servers the applications use; stop the other, and make it a standby"
                f" again (pg_rewind, pg_basebackup). If {node} is a server of its own now, remove it from fleet.toml",
                details={"node": primary.id, "nodes": [node], "was": was, "now": now},
            )
    if away := [node.id for node in absent if node.id not in answered]:
        names = list_some(away, NODES_NAMED_MAX)
        led = f" (the dsn of {list_some(same, NODES_NAMED_MAX)} leads to the server of {primary.id})" if same else ""
        raise NodeUnreachableError(
            f"{why} before a failover, and {names} can't be reached{led}",
            hint=f"stop the server that the applications don't use, and start {names}; if the promoted server is gone"
            " for good, or this server was restored from a backup of before, remove what can't be reached from"
            " fleet.toml, and repeat the command: an increment then copies the shard again",
            details={"node": primary.id, "nodes": away, "was": was, "now": now},
        )
