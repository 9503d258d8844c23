"""`resume` makes a fleet accept writes again: every node that it can reach, and only while no other operation runs."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.fleet.config import Fleet, Node
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect
from cutline.nodes.lock import FleetBusyError, lock_fleet
from cutline.nodes.read_only import (
    FreezeRecordError,
    ReadOnlyLeftError,
    check_terminal,
    freeze,
    resume_fleet,
    undo_freeze,
)
from cutline.nodes.sessions import open_sessions
from tests.commands.watching import Watching
from tests.integration.read_only.frozen_nodes import (
    FLEET_ID,
    WRITE,
    may_write,
    read_settings,
)
from tests.servers.disasters import kill_server

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet


def test_resume_thaws_every_node_and_can_be_repeated(fleet: Fleet) -> None:
    before = [read_settings(node) for node in fleet.primaries]
    for one in fleet.primaries:
        with connect(one) as connection:
            freeze(one, connection, FLEET_ID, f"operation-{one.id}", "last")
    with ExitStack() as stack:
        pooled = [stack.enter_context(closing(psycopg.connect(node.dsn))) for node in fleet.primaries]
        ours = [
            stack.enter_context(connect(node, application_name=own_label("create", "x"))) for node in fleet.primaries
        ]
        report = resume_fleet(fleet, Silent())
        assert [(one.node, one.was.operation, one.ended) for one in report.results] == [
            (node.id, f"operation-{node.id}", 1) for node in fleet.primaries
        ]
        for session in pooled:
            with pytest.raises(psycopg.OperationalError):
                session.execute("SELECT 1")
        # A command that resumes the fleet to settle an operation needs its own sessions.
        for session in ours:
            session.execute(WRITE)
    assert [read_settings(node) for node in fleet.primaries] == before
    assert resume_fleet(fleet, Silent()).results == ()


def test_resume_changes_nothing_while_another_operation_runs(fleet: Fleet, node: Node) -> None:
    with connect(node) as connection:
        freeze(node, connection, FLEET_ID, "operation-1", "last")
    with open_sessions(fleet, fleet.primaries[1:]) as sessions, lock_fleet(sessions, fleet.name):
        with pytest.raises(FleetBusyError):
            resume_fleet(fleet, Silent())
        assert not may_write(node.dsn)
    resume_fleet(fleet, Silent())
    assert may_write(node.dsn)


def test_resume_names_an_unreachable_node_and_thaws_the_others(servers: EmbeddedFleet, fleet: Fleet) -> None:
    for one in fleet.primaries:
        with connect(one) as connection:
            freeze(one, connection, FLEET_ID, "operation-1", "last")
    first, second = fleet.primaries
    kill_server(servers.primaries[1])
    watching = Watching()
    try:
        with pytest.raises(ReadOnlyLeftError) as caught:
            resume_fleet(fleet, watching)
    finally:
        servers.start_node(servers.primaries[1])
    assert caught.value.exit_code == 6
    assert second.id in caught.value.message
    assert caught.value.details == {"nodes": [second.id], "thawed": [first.id]}
    assert watching.notes == [f"node {first.id} accepts writes again"]
    assert [may_write(first.dsn), may_write(second.dsn)] == [True, False]
    assert [one.node for one in resume_fleet(fleet, Silent()).results] == [second.id]
    assert may_write(second.dsn)


def test_an_unreadable_record_is_refused_and_its_hint_undoes_the_freeze_by_hand(fleet: Fleet, node: Node) -> None:
    with connect(node) as connection:
        freeze(node, connection, FLEET_ID, "operation-1", "last")
        connection.execute(
            f'COMMENT ON PUBLICATION cutline_{FLEET_ID} IS \'{{"schema": "cutline/frozen/2"}}\''.encode()
        )
    with pytest.raises(FreezeRecordError, match=f"node {node.id}: the comment on publication cutline_") as caught:
        resume_fleet(fleet, Silent())
    assert caught.value.exit_code == 3
    watching = Watching()
    assert not undo_freeze(fleet.primaries, "operation-1", watching)
    with open_sessions(fleet, fleet.nodes) as sessions:
        check_terminal(sessions, FLEET_ID, watching, terminal=False)
        with pytest.raises(FreezeRecordError):
            check_terminal(sessions, FLEET_ID, watching, terminal=True)
    assert [note for note in watching.notes if "a newer version of Cutline may have written it" in note][1:]
    assert not may_write(node.dsn)
    statements = re.findall(r"[:;] ((?:SET|ALTER DATABASE|COMMENT ON) [^;]+)", str(caught.value.hint))
    with psycopg.connect(node.dsn, autocommit=True) as session:
        for statement in statements:
            session.execute(statement.encode())
    assert len(statements) == 3
    assert may_write(node.dsn)
    assert resume_fleet(fleet, Silent()).results == ()
