"""Open one session of each kind that commands use on a node, so that `init` finds a pooler that drops one.

The session that reads a slot is of its own kind, too, and is given from outside (wal/drain/peek.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import (
    ONE_SERVER,
    NodeUnreachableError,
    connect,
    connect_replication,
    has_answered,
    lacking_at_start,
)
from cutline.fleet.nodes.encodings import RAW
from cutline.fleet.nodes.pinned import DUMP_SETTINGS
from cutline.fleet.nodes.poolers import DIRECT, SessionUnfitError, name_pooler
from cutline.fleet.nodes.privileges import read_role
from cutline.fleet.nodes.problems import NodeProblem, refuse_unfit
from cutline.fleet.nodes.sessions import Sessions, in_parallel

# What opens a session of one more kind on a node.
Kind = Callable[[Node], AbstractContextManager[Any]]

PROCESS_QUERY = "SELECT pg_postmaster_start_time()::text, current_setting('port')"


def find_session_problems(sessions: Sessions, nodes: Iterable[Node], others: Iterable[Kind] = ()) -> list[NodeProblem]:
    """Open a session of each kind on every node; return what keeps one from being used.

    Raises NodeUnreachableError if a node does not answer.
    """
    found = in_parallel(lambda node: _find(sessions, node, others), nodes)
    return [problem for problems in found for problem in problems]


def _find(sessions: Sessions, node: Node, others: Iterable[Kind]) -> list[NodeProblem]:
    connection = sessions.connections[node.id]
    process = connection.execute(PROCESS_QUERY).fetchone()

    def open_raw(node: Node) -> AbstractContextManager[psycopg.Connection[Any]]:
        return closing(connect(node, client_encoding=RAW))

    def open_replication(node: Node) -> AbstractContextManager[psycopg.Connection[Any]]:
        return closing(connect_replication(node))

    problems: list[NodeProblem] = []
    role = read_role(node, connection)
    # To a role that may not replicate, that is told by its own problem.
    kinds = [open_raw, *([open_replication] if role.is_super or role.may_replicate else [])]
    for kind in kinds:
        try:
            with kind(node) as session:
                if session.execute(PROCESS_QUERY).fetchone() != process:
                    problem = "its dsn leads to more than one server, or it was restarted"
                    problems.append(NodeProblem(node.id, problem, ONE_SERVER))
        except (SessionUnfitError, NodeUnreachableError) as error:
            if isinstance(error, NodeUnreachableError) and not has_answered(error.__cause__):
                raise
            problems.append(_problem_of(node, error))
    for other in others:
        try:
            with other(node):
                pass
        except SessionUnfitError as error:
            problems.append(_problem_of(node, error))
    if not problems and node.backup_of is None:
        problems += find_dump_problems(node, connection)
    return problems


def _problem_of(node: Node, error: SessionUnfitError | NodeUnreachableError) -> NodeProblem:
    return NodeProblem(node.id, error.message.removeprefix(f"node {node.id}: "), error.hint)


def find_dump_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """Yield a problem for each setting that pg_dump's sessions lack: Cutline sets its own, and can't set those."""
    lacking = lacking_at_start(connection)
    if not (needed := [name for name in DUMP_SETTINGS if name in lacking]):
        return
    role = read_role(node, connection)
    what = f"its dsn leads to {name_pooler(node)}, which drops the settings that pg_dump asks for"
    for name in needed:
        change = "RESET role" if name == "role" else f"SET {name} = '{lacking[name]}'"
        remedy = f"ALTER ROLE {role.quoted} {change};"
        yield NodeProblem(
            node.id,
            f"{what} ({', '.join(needed)}): {DIRECT}; or give them to the role, and let the pooler connect anew",
            remedy,
            role.place,
        )


def check_dump_settings(node: Node, connection: psycopg.Connection[Any]) -> None:
    """Raise NodeUnfitError if pg_dump's sessions on the node lack settings, with the statements that give them."""
    refuse_unfit(find_dump_problems(node, connection))
