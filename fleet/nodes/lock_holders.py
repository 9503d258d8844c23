"""Ask every primary who holds the fleet's lock, without waiting for nodes that are silent."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psycopg

from fleet.config import Fleet, Node
from fleet.nodes.connections import connect, unreachable_error
from fleet.nodes.lock import Holder, find_holder, lock_key
from storage.errors import SnapshotError

ASKING_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class LockAnswer:
    """Who holds the lock on a node, None if nobody does. `problem` says why the node gave no answer."""

    node: str
    holder: Holder | None = None
    problem: str = ""


def ask_lock_holders(fleet: Fleet) -> list[LockAnswer]:
    """The answers of all primaries, in the order of fleet.toml, within ASKING_SECONDS_MAX."""
    found: dict[str, LockAnswer] = {}
    deadline = time.monotonic() + ASKING_SECONDS_MAX
    threads = [
        # Daemons: a node that accepts the connection but never answers must not keep the command from ending.
        threading.Thread(target=_ask, args=(node, lock_key(fleet.name), found), name=f"lock of {node.id}", daemon=True)
        for node in fleet.primaries
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {ASKING_SECONDS_MAX:.0f} s"
    return [found.get(node.id) or LockAnswer(node.id, problem=late) for node in fleet.primaries]


def _ask(node: Node, key: int, found: dict[str, LockAnswer]) -> None:
    try:
        with connect(node, connect_timeout=str(int(ASKING_SECONDS_MAX))) as connection:
            found[node.id] = LockAnswer(node.id, find_holder(connection, key))
    except SnapshotError as error:
        found[node.id] = LockAnswer(node.id, problem=error.message.removeprefix(f"node {node.id}: "))
    except psycopg.Error as error:
        message = unreachable_error(node, error).message
        found[node.id] = LockAnswer(node.id, problem=message.removeprefix(f"node {node.id}: "))
