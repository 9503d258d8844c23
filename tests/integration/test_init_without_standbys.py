"""`init` does without a standby that is away, as a create does, and says what follows; settings are still refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from cutline.cli.commands.init import lines_of
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import stop_server
from cutline.fleet.config import Fleet
from cutline.nodes.problems import NodeUnfitError
from cutline.snapshots.create.initialise import initialise
from cutline.storage.errors import UnreachableError
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, run_command
from tests.commands.watching import Watching
from tests.faults.awaited import await_none
from tests.servers.dealt import start_pair

STANDBY, OTHER = "s1-b1", "s2-b1"
REQUIRED = '[copies]\nrequire = "all"\n'
FEEDBACK_QUERY = "SELECT FROM pg_settings WHERE name = 'hot_standby_feedback' AND setting = 'on'"
NOT_STREAMING = "it is not streaming from its primary"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    with start_pair(tmp_path_factory.mktemp("without")) as (running, _):
        yield running


@dataclass(frozen=True)
class Place:
    """A fleet for which init has never run."""

    servers: EmbeddedFleet
    fleet: Fleet

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.fleet.node(STANDBY).dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture
def place(servers: EmbeddedFleet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    # The pattern matches nothing, which init notes while its sessions are open.
    more = '[groups]\nexclude = ["public.nothing"]\n' + getattr(request, "param", "")
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=more)
    with dropping_slots(fleet):
        try:
            yield Place(servers, fleet)
        finally:
            known = ChangingFleet(servers, fleet, Runs(fleet, Ready(None)), tmp_path)  # type: ignore[arg-type]
            known.start(STANDBY)


@contextmanager
def cut_off(place: Place) -> Iterator[None]:
    """The standby of s1 receives no WAL."""

    def follow(conninfo: str) -> None:
        place.execute(f"ALTER SYSTEM SET primary_conninfo = '{conninfo}'", "SELECT pg_reload_conf()")

    with psycopg.connect(place.fleet.node(STANDBY).dsn, autocommit=True) as standby:
        ((conninfo,),) = standby.execute("SHOW primary_conninfo").fetchall()
        follow("")
        try:
            await_none(lambda: standby.execute("SELECT FROM pg_stat_wal_receiver").fetchall())
            yield
        finally:
            follow(conninfo.replace("'", "''"))


def test_a_fleet_begins_without_a_standby_that_does_not_stream(place: Place) -> None:
    with cut_off(place):
        code, document = run_command(place.fleet, "init")
        assert code == 0, document
        assert [node["node"] for node in document["nodes"]] == ["s1", "s2", OTHER]
        action = "check primary_conninfo and the standby's log"
        absent = {"node": STANDBY, "primary": "s1", "reason": NOT_STREAMING, "action": action}
        assert document["absent"] == [absent]
        assert f"standby {STANDBY} is left out: {NOT_STREAMING} ({action})" in document["warnings"][0]
        assert document["published"].keys() == {"s1", "s2"}
        code, document = run_command(place.fleet, "create", "chain")
        assert (code, [one["name"] for one in document["left_out"] if one["kind"] == "absent_copy"]) == (0, [STANDBY])
    code, document = run_command(place.fleet, "create", "chain", "--incremental")
    assert (code, [one["node"] for one in document["renewed"]]) == (0, [STANDBY]), document


def test_it_says_what_is_left_out_and_calls_no_shard_one_without_a_standby(place: Place) -> None:
    stop_server(place.servers.node(STANDBY), immediate=True)
    report = initialise(place.fleet, Watching())
    lines = lines_of(report)
    assert [(one.node, one.primary) for one in report.absent] == [(STANDBY, "s1")]
    assert any(line.startswith(f"warning: standby {STANDBY} is left out: ") for line in lines)
    assert not any("without a standby" in line for line in lines)


def test_a_standby_that_falls_during_the_checks_is_left_out(place: Place) -> None:
    class Stopping(Watching):
        def note(self, text: str) -> None:
            Watching.note(self, text)
            if "public.nothing" in text and len(self.notes) == 1:
                stop_server(place.servers.node(STANDBY), immediate=True)

    progress = Stopping()
    report = initialise(place.fleet, progress)
    assert [one.node for one in report.absent] == [STANDBY]
    assert any(note.endswith("; init begins again") for note in progress.notes), progress.notes


@pytest.mark.parametrize("place", [REQUIRED], indirect=True)
def test_a_required_standby_that_is_away_is_refused(place: Place) -> None:
    with cut_off(place), pytest.raises(NodeUnfitError, match=f"{STANDBY}: {NOT_STREAMING}"):
        initialise(place.fleet, Watching())
    stop_server(place.servers.node(STANDBY), immediate=True)
    with pytest.raises(UnreachableError, match=STANDBY):
        initialise(place.fleet, Watching())


def test_a_setting_of_a_standby_that_runs_is_refused(place: Place) -> None:
    """A create would leave it out: whoever runs init can change the setting now."""
    place.execute("ALTER SYSTEM SET hot_standby_feedback = off", "SELECT pg_reload_conf()")
    try:
        with psycopg.connect(place.fleet.node(STANDBY).dsn, autocommit=True) as standby:
            await_none(lambda: standby.execute(FEEDBACK_QUERY).fetchall())
        with pytest.raises(NodeUnfitError, match=f"{STANDBY}: hot_standby_feedback is off"):
            initialise(place.fleet, Watching())
    finally:
        place.execute("ALTER SYSTEM SET hot_standby_feedback = on", "SELECT pg_reload_conf()")
