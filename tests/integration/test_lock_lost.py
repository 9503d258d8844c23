"""An operation that loses its lock before its commit takes the lock again, or does not commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import cutline.snapshots.create.cut_attempt as taking
import cutline.snapshots.create.increment as incremental
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Silent
from cutline.nodes.lock import lock_fleet
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.proven_chains import increment_numbers
from cutline.storage.errors import SnapshotError
from tests.commands.snapshot_runs import (
    Runs,
    runs_on,
)
from tests.held.lock_holders import end_holder, read_lock_holders

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NAME = "locked"


@pytest.fixture(scope="module")
def chain(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store and a full snapshot."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("lock"), spark) as runs:
        runs.full(NAME)
        yield runs


def committed(runs: Runs) -> list[int]:
    return increment_numbers(runs.fleet.store.open(), NAME)


def disturb_before(monkeypatch: pytest.MonkeyPatch, name: str, disturb: Callable[[], None]) -> None:
    """Call `disturb` before the step `name` of an increment."""
    where = taking if hasattr(taking, name) else incremental
    step = getattr(where, name)

    def disturbed_step(*arguments: Any) -> Any:
        disturb()
        return step(*arguments)

    monkeypatch.setattr(where, name, disturbed_step)


@pytest.mark.parametrize(("step", "slug"), [
    # The same sessions read the sequences between these two steps.
    ("read_sequences", "node-unreachable"), ("check_exclusive", "fleet-lock-lost"),
])  # fmt: skip
def test_an_operation_that_lost_its_lock_after_the_cut_does_not_commit(
    chain: Runs, monkeypatch: pytest.MonkeyPatch, step: str, slug: str
) -> None:
    before = committed(chain)
    with monkeypatch.context() as patched:
        if step == "read_sequences":
            unpatched = taking.make_cut

            def make_cut(*arguments: Any) -> Any:
                cut = unpatched(*arguments)
                end_holder(chain.fleet, "s2")
                return cut

            patched.setattr(taking, "make_cut", make_cut)
        else:
            disturb_before(patched, step, lambda: end_holder(chain.fleet, "s2"))
        with pytest.raises(SnapshotError) as raised:
            chain.increment(NAME)
    assert (raised.value.slug, raised.value.exit_code, raised.value.details["node"]) == (slug, 6, "s2")
    assert committed(chain) == before
    assert chain.increment(NAME).increment == len(before) + 1


def test_a_lock_lost_before_the_cut_is_taken_again(chain: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = committed(chain)
    with monkeypatch.context() as patched:
        disturb_before(patched, "make_cut", lambda: end_holder(chain.fleet, "s1"))
        commit = chain.increment(NAME)
    assert commit.increment == len(before) + 1
    assert commit.cut.attempts == 1
    assert [read_lock_holders(node.dsn) for node in chain.fleet.primaries] == [[], []]


def test_a_lost_lock_that_another_operation_has_taken_ends_the_operation(
    chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = committed(chain)
    primary = chain.fleet.node("s1")
    with open_sessions(chain.fleet, [primary]) as sessions, monkeypatch.context() as patched:

        def take_over() -> None:
            end_holder(chain.fleet, "s1")
            rival_lock.__enter__()

        rival_lock = lock_fleet(sessions, chain.fleet.name, own_label("create", "faster"))
        disturb_before(patched, "make_cut", take_over)
        with pytest.raises(SnapshotError) as raised:
            chain.increment(NAME)
        rival_lock.__exit__(None, None, None)
    assert (raised.value.slug, raised.value.exit_code) == ("fleet-busy", 7)
    assert raised.value.details["snapshot"] == "faster"
    assert committed(chain) == before


def test_an_operation_that_another_has_settled_does_not_commit(chain: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = committed(chain)

    def settle() -> None:
        for node in chain.fleet.primaries:
            end_holder(chain.fleet, node.id)
        with (
            open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
            lock_fleet(sessions, chain.fleet.name),
        ):
            settle_operations(chain.fleet.store.open(), chain.fleet, Silent())

    with monkeypatch.context() as patched:
        disturb_before(patched, "make_cut", settle)
        with pytest.raises(SnapshotError) as raised:
            chain.increment(NAME)
    assert (raised.value.slug, raised.value.exit_code) == ("operation-settled", 7)
    assert committed(chain) == before
    assert chain.increment(NAME).increment == len(before) + 1
