"""Ask every primary who holds the fleet's lock, without waiting for nodes that are silent."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.config import Fleet
from fleet.nodes.lock import Holder, find_holder, lock_key
from fleet.nodes.nodes_query import NodesQuery

ASKING_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class LockAnswer:
    """Who holds the lock on a node, None if nobody does. `problem` says why the node gave no answer."""

    node: str
    holder: Holder | None = None
    problem: str = ""


def ask_lock_holders(fleet: Fleet) -> list[LockAnswer]:
    """The answers of all primaries, in the order of fleet.toml, within ASKING_SECONDS_MAX."""
    key = lock_key(fleet.name)
    query = NodesQuery(fleet.primaries, lambda _, connection: find_holder(connection, key), ASKING_SECONDS_MAX)
    answers = query.answers()
    return [
        LockAnswer(node.id, answers.found.get(node.id), answers.problems.get(node.id, "")) for node in fleet.primaries
    ]
