"""An operation whose lock was lost before its commit takes it again, or does not commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import snapshots.create.cut_attempt as taking
import snapshots.create.increment_attempt as incremental
from embedded.fleet import EmbeddedFleet
from fleet.label import own_label
from fleet.nodes.lock import lock_fleet
from fleet.nodes.sessions import open_sessions
from fleet.progress import Silent
from snapshots.operations.settling import settle_operations
from snapshots.records.commits import increment_numbers
from storage.errors import SnapshotError
from tests.held.lock_holders import end_holder, holders
from tests.snapshot_runs import (
    Runs,
    runs_on,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NAME = "locked"


@pytest.fixture(scope="module")
def chain(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a full snapshot in a store of its own."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("lock"), spark) as runs:
        runs.full(NAME)
        yield runs


def committed(runs: Runs) -> list[int]:
    return increment_numbers(runs.fleet.store.open(), NAME)


def disturbed(monkeypatch: pytest.MonkeyPatch, name: str, disturb: Callable[[], None]) -> None:
    """Do `disturb` before the step `name` of an increment's work."""
    where = taking if hasattr(taking, name) else incremental
    step = getattr(where, name)

    def after(*arguments: Any) -> Any:
        disturb()
        return step(*arguments)

    monkeypatch.setattr(where, name, after)


@pytest.mark.parametrize(("step", "slug"), [
    # The sequences are read between these two, by the same sessions.
    ("read_sequences", "node-unreachable"), ("check_exclusive", "fleet-lock-lost"),
])  # fmt: skip
def test_who_lost_the_lock_after_the_cut_does_not_commit(
    chain: Runs, monkeypatch: pytest.MonkeyPatch, step: str, slug: str
) -> None:
    before = committed(chain)
    with monkeypatch.context() as patched:
        if step == "read_sequences":
            made = taking.make_cut

            def make_cut(*arguments: Any) -> Any:
                cut = made(*arguments)
                end_holder(chain.fleet, "s2")
                return cut

            patched.setattr(taking, "make_cut", make_cut)
        else:
            disturbed(patched, step, lambda: end_holder(chain.fleet, "s2"))
        with pytest.raises(SnapshotError) as raised:
            chain.increment(NAME)
    assert (raised.value.slug, raised.value.exit_code, raised.value.details["node"]) == (slug, 6, "s2")
    assert committed(chain) == before
    assert chain.increment(NAME).increment == len(before) + 1


def test_a_lock_that_was_lost_before_the_cut_is_taken_again(chain: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = committed(chain)
    with monkeypatch.context() as patched:
        disturbed(patched, "make_cut", lambda: end_holder(chain.fleet, "s1"))
        commit = chain.increment(NAME)
    assert commit.increment == len(before) + 1
    assert commit.cut.attempts == 1
    assert [holders(node.dsn) for node in chain.fleet.primaries] == [[], []]


def test_a_lock_that_another_took_meanwhile_ends_the_operation(chain: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = committed(chain)
    primary = chain.fleet.node("s1")
    with open_sessions(chain.fleet, [primary]) as sessions, monkeypatch.context() as patched:

        def overtaken() -> None:
            end_holder(chain.fleet, "s1")
            entered.__enter__()

        entered = lock_fleet(sessions, chain.fleet.name, own_label("create", "faster"))
        disturbed(patched, "make_cut", overtaken)
        with pytest.raises(SnapshotError) as raised:
            chain.increment(NAME)
        entered.__exit__(None, None, None)
    assert (raised.value.slug, raised.value.exit_code) == ("fleet-busy", 7)
    assert raised.value.details["snapshot"] == "faster"
    assert committed(chain) == before


def test_an_operation_that_was_settled_as_dead_meanwhile_does_not_commit(
    chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = committed(chain)

    def settled() -> None:
        for node in chain.fleet.primaries:
            end_holder(chain.fleet, node.id)
        with (
            open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
            lock_fleet(sessions, chain.fleet.name),
        ):
            settle_operations(chain.fleet.store.open(), chain.fleet, Silent())

    with monkeypatch.context() as patched:
        disturbed(patched, "make_cut", settled)
        with pytest.raises(SnapshotError) as raised:
            chain.increment(NAME)
    assert (raised.value.slug, raised.value.exit_code) == ("operation-settled", 7)
    assert committed(chain) == before
    assert chain.increment(NAME).increment == len(before) + 1
