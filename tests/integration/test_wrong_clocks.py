"""A command whose machine has a wrong clock: snapshots and retention go by the clocks of the nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Retention
from cutline.fleet.progress import Silent
from cutline.nodes.clocks import ClocksDifferError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import chain_at, cut_time, read_chain
from cutline.snapshots.removal.pruning import PrunePlan, prune_store
from cutline.storage.clock import follow_machine
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAYS = timedelta(days=400)
WARNING = "this machine's clock is 400 days {} nodes s1, s2: the nodes' time is used"


@dataclass
class Notes(Silent):
    """Keeps what is noted."""

    lines: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("clocks")
    try:
        servers = start_fleet(folder / "fleet", shards=2, backups=0)
        found = Runs(configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store"), Ready(spark))
        found.init()
        yield found
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[timedelta], None]]:
    """Sets this machine's clock: by so much it is ahead of the servers'."""
    ahead = timedelta(0)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + ahead

    def set_ahead(by: timedelta) -> None:
        nonlocal ahead
        ahead = by
        follow_machine()

    monkeypatch.setattr("cutline.storage.clock.datetime", Clock)
    monkeypatch.setattr("cutline.nodes.clocks._told_seconds", 0.0)
    yield set_ahead
    follow_machine()


def take(runs: Runs, name: str, progress: Silent, *, full: bool = False) -> Commit:
    return (create_full if full else create_increment)(runs.fleet, CreateRequest(name), runs.spark, progress)


def prune(runs: Runs, rules: Retention, progress: Silent) -> PrunePlan:
    return prune_store(runs.fleet, rules, progress, lambda _plan: None, force=False).plan


def test_snapshots_of_a_command_whose_clock_is_wrong_have_the_nodes_times(
    runs: Runs, set_clock: Callable[[timedelta], None]
) -> None:
    store, progress = runs.fleet.store.open(), Notes()
    began, moments = datetime.now(UTC), []
    set_clock(-DAYS)
    for full, off in ((True, -DAYS), (False, DAYS), (False, timedelta(0)), (False, -DAYS)):
        set_clock(off)
        commit = take(runs, "chain", progress, full=full)
        moments.append(datetime.now(UTC))
        # The difference of the clocks is known to a millisecond.
        slack = timedelta(milliseconds=1)
        between = (moments[-2] if len(moments) > 1 else began) - slack
        assert between <= datetime.fromisoformat(commit.created_at) <= cut_time(commit) <= moments[-1] + slack
        assert between <= datetime.fromisoformat(current_time()) <= datetime.now(UTC) + slack
    told = [line for line in progress.lines if "clock" in line]
    expected = [WARNING.format(word) for word in ("behind", "ahead of", "behind")]
    assert [line.partition(";")[0] for line in told] == expected

    # restore --at: what was the newest cut at each moment.
    chain = read_chain(store, "chain")
    for number, moment in enumerate(moments):
        assert chain_at(chain, moment).last.increment == number

    # Nothing is older than 30 days, whatever this machine's clock says when it prunes.
    take(runs, "second", progress, full=True)
    for off, word in ((timedelta(0), ""), (DAYS, "ahead of"), (-DAYS, "behind")):
        set_clock(off)
        notes = Notes()
        assert prune(runs, Retention(within_seconds=30 * 86400), notes).steps == ()
        assert [line.partition(";")[0] for line in notes.lines] == ([WARNING.format(word)] if word else [])


def test_a_cut_is_refused_if_no_clock_can_be_believed(
    runs: Runs, set_clock: Callable[[timedelta], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    create_full(runs.fleet, CreateRequest("clear"), runs.spark, Silent())
    read = monkeypatch.context

    def off_by(seconds: float) -> Callable[[float], datetime]:
        return lambda epoch: datetime.fromtimestamp(epoch + seconds, UTC)

    # The machine with both servers has lost its clock: an increment would be older than the snapshot.
    with read() as patch:
        patch.setattr("cutline.nodes.baseline.time_of_epoch", off_by(-DAYS.total_seconds()))
        set_clock(-DAYS)
        with pytest.raises(ClocksDifferError, match=r"^a cut was made at .*, but it is now .* according to node s1"):
            take(runs, "clear", Silent())
        assert read_chain(runs.fleet.store.open(), "clear").last.increment == 0
    # Each server and this machine have another time.
    offs = iter([0.0, 7200.0] * 2)
    with read() as patch:
        patch.setattr("cutline.nodes.baseline.time_of_epoch", lambda epoch: off_by(next(offs))(epoch))
        set_clock(DAYS)
        with pytest.raises(ClocksDifferError, match="none can be trusted"):
            take(runs, "other", Silent(), full=True)
        with pytest.raises(ClocksDifferError, match="none can be trusted"):
            prune(runs, Retention(within_seconds=30 * 86400), Silent())
    # By number, nothing depends on the time.
    offs = iter([0.0, 7200.0])
    with read() as patch:
        patch.setattr("cutline.nodes.baseline.time_of_epoch", lambda epoch: off_by(next(offs))(epoch))
        notes = Notes()
        assert prune(runs, Retention(last=9), notes).steps == ()
        assert [line for line in notes.lines if "none can be trusted" in line]
    set_clock(timedelta(0))
    assert take(runs, "clear", Silent()).increment == 1
