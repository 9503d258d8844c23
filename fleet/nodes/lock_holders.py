"""Ask every primary who holds the fleet's locks, without waiting for nodes that are silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.fleet.config import Fleet, Node
from cutline.fleet.nodes.lock import Holder, find_holder, watch_lock
from cutline.fleet.nodes.nodes_query import NodesQuery

ASKING_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class LockAnswer:
    """Who holds the fleet's lock on a node, and whose turn it is to watch; None if nobody does.

    `problem` says why the node gave no answer.
    """

    node: str
    holder: Holder | None = None
    watch: Holder | None = None
    problem: str = ""


def ask_lock_holders(fleet: Fleet) -> list[LockAnswer]:
    """The answers of all primaries, in the order of fleet.toml, within ASKING_SECONDS_MAX."""

    def ask(_node: Node, connection: psycopg.Connection[Any]) -> tuple[Holder | None, Holder | None]:
        return find_holder(connection, fleet.name), find_holder(connection, watch_lock(fleet))

    answers = NodesQuery(fleet.primaries, ask, ASKING_SECONDS_MAX).answers()
    return [
        LockAnswer(node.id, *answers.found.get(node.id, (None, None)), problem=answers.problems.get(node.id, ""))
        for node in fleet.primaries
    ]
