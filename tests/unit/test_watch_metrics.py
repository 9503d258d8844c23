"""What a watch publishes of itself, where to, and what it says of what it can't publish."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.notices import Notices
from cutline.cli.watch.schedule import Task, TaskKind
from cutline.cli.watch.watch_metrics import _Publisher, samples_of_watch
from cutline.cli.watch.watcher import Watcher
from cutline.fleet.config import Fleet, ListenAddress, MetricsRules
from cutline.fleet.hours import Hours
from cutline.fleet.progress import Silent
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics_endpoint import MetricsEndpoint
from cutline.snapshots.listing.metrics_gathering import Gathered, MetricsGatherer
from cutline.snapshots.operations.activity import Activity
from cutline.storage.clock import utc_now
from cutline.storage.errors import UnreachableError
from tests.unit.document_kinds import FLEET
from tests.unit.made_fleets import new_fleet
from tests.unit.metric_values import of, read, values_of


def new_watcher(folder: Path, said: list[str], metrics: MetricsRules) -> Watcher:
    """A watch of a fleet whose node is away."""
    away = replace(FLEET.nodes[0], dsn=f"host={folder} dbname=x")
    fleet = replace(new_fleet(), nodes=(away,), metrics=metrics)
    source = FleetSource(folder / "fleet.toml", fleet, b"", b"")

    def say(text: str, **_: object) -> None:
        said.append(text)

    return Watcher(source, cast(Activity, Silent()), "20261124T000000Z-0000000000", say, Notices(source, say))


def gather_in_turn(publisher: _Publisher) -> None:
    """Let it gather and publish once."""
    publisher.ended.set()
    publisher.run()


def test_only_the_active_watch_writes_the_file_and_without_an_endpoint_only_it_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cutline.prom"
    gathered: list[Fleet] = []
    original = MetricsGatherer.gather

    def gather(gatherer: MetricsGatherer, fleet: Fleet) -> Gathered:
        gathered.append(fleet)
        return original(gatherer, fleet)

    monkeypatch.setattr(MetricsGatherer, "gather", gather)
    watcher = new_watcher(tmp_path, [], MetricsRules(file=file))
    publisher = _Publisher(watcher)
    file.write_text("the active watch's")
    gather_in_turn(publisher)
    assert (file.read_text(), gathered) == ("the active watch's", [])
    watcher.is_active = True
    gather_in_turn(publisher)
    assert of(metrics.WATCH_ACTIVE, values_of(file.read_bytes())) == {"": 1}


def test_a_watch_that_stands_by_serves_its_metrics_and_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "cutline.prom"
    watcher = new_watcher(tmp_path, [], MetricsRules(file=file))
    with MetricsEndpoint(ListenAddress("127.0.0.1", 0), 60.0) as endpoint:
        publisher = _Publisher(watcher, endpoint)
        publisher._publish(watcher.source.fleet)
        assert of(metrics.WATCH_ACTIVE, values_of(endpoint.answer("/metrics").body)) == {"": 0}
    assert not file.exists()


def test_each_problem_is_said_once_until_it_is_gone_and_again_when_it_returns(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "textfiles"
    with MetricsEndpoint(ListenAddress("127.0.0.1", 0), 60.0) as other:
        taken = ListenAddress("127.0.0.1", other.port)
        watcher = new_watcher(tmp_path, said, MetricsRules(file=folder / "cutline.prom", listen=taken))
        watcher.is_active = True
        publisher = _Publisher(watcher)
        for _ in range(3):
            gather_in_turn(publisher)
        listen, gather, write = said
        assert f":{other.port}" in listen
        assert "node a: " in gather
        assert str(folder) in write
        folder.mkdir()
        gather_in_turn(publisher)
        assert len(said) == 3
        (folder / "cutline.prom").unlink()
        folder.rmdir()
        gather_in_turn(publisher)
        assert said[3:] == [write]


def test_a_watch_that_waits_counts_how_often_it_could_not_begin(tmp_path: Path) -> None:
    watcher = new_watcher(tmp_path, [], MetricsRules())
    for number in range(4):
        found = read(samples_of_watch(watcher))
        assert (of(metrics.WATCH_ACTIVE, found), of(metrics.WATCH_FAILURES, found)) == ({"": 0}, {"watch": number})
        watcher.notices.waits(UnreachableError("node a is away"))
    watcher.notices.waits(None)
    assert of(metrics.WATCH_FAILURES, read(samples_of_watch(watcher))) == {"watch": 0}


def test_a_task_that_waits_for_the_hours_begins_when_they_do(tmp_path: Path) -> None:
    watcher = new_watcher(tmp_path, [], MetricsRules())
    watcher.is_active = True
    now = utc_now()
    opens = (now + timedelta(hours=2)).replace(minute=0, second=0, microsecond=0)
    hours = Hours.parse(f"{opens:%H:%M}-{opens + timedelta(minutes=1):%H:%M}")
    watcher.source.fleet = replace(watcher.source.fleet, hours=hours)
    long_ago = now - timedelta(days=30)
    watcher.tasks |= {kind: Task(kind, 60.0, long_ago) for kind in (TaskKind.CHECK, TaskKind.PRUNE)}
    found = of(metrics.WATCH_NEXT, read(samples_of_watch(watcher)))
    assert found == {"check": opens.timestamp(), "prune": (long_ago + timedelta(seconds=60)).timestamp()}
