"""Markers on real servers: one thread writes them; a server that does not answer is named, the others stay usable."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

import cutline.wal.cut.markers
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import DEFAULT_SETTINGS, SUPERUSER, EmbeddedNode, start_server, stop_server
from cutline.fleet.lsn import Lsn
from cutline.nodes.programs import Programs, server_programs, shared_temporary_directory
from cutline.wal.cut.markers import Marker, marker_from_bytes, write_markers
from tests.servers.installed import require_server
from tests.wal.markers import write_marker

MARKER = Marker("chain ü", "1", "start")
BEFORE_17 = (15, 16)
END_OF_WAL = "SELECT pg_current_wal_insert_lsn()::text"
Sessions = dict[str, psycopg.Connection[tuple[object, ...]]]


@pytest.fixture
def sessions(shared_fleet: EmbeddedFleet) -> Iterator[Sessions]:
    with ExitStack() as stack:
        yield {
            node.id: stack.enter_context(psycopg.connect(node.dsn("postgres"), autocommit=True))
            for node in shared_fleet.primaries
        }


def position(session: psycopg.Connection[tuple[object, ...]]) -> int:
    row = session.execute(END_OF_WAL).fetchone()
    assert row is not None
    return Lsn.parse(str(row[0]))


def pid(session: psycopg.Connection[tuple[object, ...]]) -> int:
    return session.info.backend_pid


def test_every_marker_is_at_the_returned_position(sessions: Sessions) -> None:
    before = {node: position(session) for node, session in sessions.items()}
    written = write_markers(sessions, MARKER)
    assert list(written) == list(sessions)
    for node, session in sessions.items():
        assert before[node] < written[node].position <= position(session)


def test_a_lost_session_is_named_and_the_others_stay_usable(sessions: Sessions) -> None:
    lost, other = list(sessions)
    with psycopg.connect(sessions[lost].info.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", [pid(sessions[lost])])
    with pytest.raises(psycopg.OperationalError, match=f"^node {lost}: "):
        write_markers(sessions, MARKER)
    assert sessions[lost].closed
    assert write_markers({other: sessions[other]}, MARKER)
    # A session that was already closed counts as lost, too.
    with pytest.raises(psycopg.OperationalError, match=f"^node {lost}: "):
        write_markers(sessions, MARKER)
    assert sessions[other].execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_does_not_answer_is_named_within_the_bound(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, other = reversed(list(sessions))
    monkeypatch.setattr(cutline.wal.cut.markers, "MARKER_SECONDS_MAX", 1.0)
    stopped = pid(sessions[silent])
    os.kill(stopped, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match=f"^node {silent}: no answer within 1 s$"):
            write_markers(sessions, MARKER)
        assert time.monotonic() - began < 10
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert sessions[silent].closed
    assert sessions[other].execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_refuses_is_named_and_its_session_stays_usable(
    sessions: Sessions, shared_fleet: EmbeddedFleet
) -> None:
    primary = shared_fleet.primaries[0]
    (standby, *_) = shared_fleet.backups_of(primary)
    with psycopg.connect(standby.dsn("postgres"), autocommit=True) as session:
        sessions[standby.id] = session
        with pytest.raises(psycopg.Error, match=f"^node {standby.id}: "):
            write_markers(sessions, MARKER)
        for each in sessions.values():
            assert each.execute("SELECT 1").fetchone() == (1,)


@pytest.fixture(params=BEFORE_17)
def older(request: pytest.FixtureRequest) -> Iterator[EmbeddedNode]:
    programs = Programs(require_server(request.param).programs, server_programs().account)
    folder = Path(tempfile.mkdtemp(prefix="cutline-older-", dir=shared_temporary_directory()))
    if programs.account:
        os.chown(folder, programs.account.uid, programs.account.gid)
    node = EmbeddedNode("older", folder)
    try:
        options = ["--no-sync", "--encoding=UTF8", "--locale=C", "--auth=trust", f"--username={SUPERUSER}"]
        programs.run("initdb", *options, f"--pgdata={node.data_directory}")
        # Asynchronous commit, so that nothing but the marker itself flushes it.
        chosen = {**DEFAULT_SETTINGS, "synchronous_commit": "off", "wal_writer_delay": "10s"}
        with (node.data_directory / "postgresql.conf").open("a") as settings:
            settings.writelines(f"{name} = '{value}'\n" for name, value in chosen.items())
        start_server(programs, node)
        yield node
    finally:
        if node.data_directory.exists():
            stop_server(node, immediate=True)
        shutil.rmtree(folder)


def test_before_17_a_marker_is_durable_and_decodable(older: EmbeddedNode) -> None:
    dsn = older.dsn("postgres")
    with psycopg.connect(dsn, autocommit=True) as session:
        assert session.info.server_version // 10000 in BEFORE_17
        session.execute("CREATE PUBLICATION p FOR ALL TABLES")
        session.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        markers = [Marker("c'\\é", str(number), "start") for number in range(3)]
        written = [write_marker(session, marker) for marker in markers]
        # The markers are flushed: they survive a crash, and only flushed WAL can be decoded.
        flushed = session.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert flushed is not None
        assert written[-1] <= Lsn.parse(flushed[0])
        assert session.execute("SHOW synchronous_commit").fetchone() == ("off",)
        options = "'proto_version', '1', 'publication_names', 'p', 'messages', 'true'"
        peeked = session.execute(f"SELECT data FROM pg_logical_slot_peek_binary_changes('s', NULL, NULL, {options})")
        messages = [data for (data,) in peeked if data[:1] == b"M"]
    # 'M', flags, position, prefix, length, content (PostgreSQL manual, "Logical Replication Message Formats").
    assert [int.from_bytes(data[2:10], "big") for data in messages] == written
    assert [marker_from_bytes(data[data.index(b"{") :]) for data in messages] == markers
