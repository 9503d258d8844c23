"""A command that was suspended past its lease says what others have done meanwhile, and calls nothing damaged.

The command runs in this process. At one of its calls to the store, the others run, each as a process of its own: to
them, its lease has expired. `make test` suspends it at some of its calls, `make rest` at more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.connections import with_database
from cutline.snapshots.operations import leases
from cutline.storage.local import LocalStore
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import configure_fleet, dropping_slots, run_command
from tests.integration.refusing import execute
from tests.run.soak import first
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CALLS = ("read", "read_range", "create", "size", "exists", "list_children", "inventory", "list", "delete")
# The numbers of calls after which it is suspended again.
STEPS = first([15, 4])
NAME, DATABASE = "weekly", "shop"
GC = ("gc", "--grace", "0s", "--yes")
# What others do meanwhile.
OTHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gc": (GC,),
    "the same merge": (("merge", NAME, "--to", "3"),),
    "the same merge, all of it": (("merge", NAME, "--to", "3", "--drop-earlier", "--yes"), GC),
    "a later merge": (("merge", NAME, "--to", "4", "--drop-earlier", "--yes"), GC),
    "an earlier merge": (("merge", NAME, "--to", "2", "--drop-earlier", "--yes"), GC),
    "delete": (("delete", NAME, "--yes"), GC),
    "prune": (("prune", "--keep-only-full", "2", "--yes"), GC),
}
Ends = dict[tuple[int, str], str]
SETTLED: Ends = {(7, "operation-settled"): "another command settled operation "}
DELETED: Ends = {(3, "snapshot-deleted"): f"snapshot {NAME} was deleted at "}
PRUNED: Ends = {(3, "snapshot-missing"): f"the increments of snapshot {NAME} were pruned"}
OUTDATED: Ends = {(3, "repair-outdated"): f"the increments of {NAME} were pruned since the repair was planned"}
DONE: Ends = {(0, ""): ""}


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of a full snapshot and four increments in a store of which every test gets copies."""

    fleet: Fleet
    folder: Path
    spark: SparkSession
    numbers: Iterator[int]

    def copied(self) -> Fleet:
        """The fleet with a copy of the store, and a target on the same server."""
        number = next(self.numbers)
        store, path = self.folder / f"store-{number}", self.folder / f"fleet-{number}.toml"
        shutil.copytree(self.folder / "store", store)
        path.write_text(self.fleet.path.read_text().replace(f"{self.folder}/store", str(store)))
        self.target.write_text(path.read_text().replace("/bank", f"/{DATABASE}"))
        return load_fleet(path)

    @property
    def target(self) -> Path:
        return self.folder / "target.toml"

    @property
    def maintenance(self) -> str:
        return with_database(self.fleet.primaries[0], "postgres").dsn

    def databases(self) -> list[str]:
        """The databases that restores have made."""
        with psycopg.connect(self.maintenance) as connection:
            found = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'shop%'").fetchall()
        return [name for (name,) in found]

    def drop_restored(self) -> None:
        for name in self.databases():
            execute(self.maintenance, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Chain]:
    folder = tmp_path_factory.mktemp("suspended")
    servers = start_fleet(folder / "fleet", shards=1, backups=0)
    try:
        fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
        dsn = fleet.primaries[0].dsn
        execute(dsn, "CREATE TABLE item (id int PRIMARY KEY, text text)")
        execute(dsn, "INSERT INTO item SELECT n, 'a' FROM generate_series(1, 200) AS n")
        with dropping_slots(fleet):
            for words in (("init",), ("create", NAME)):
                assert run_command(fleet, *words)[0] == 0
            for number in range(4):
                execute(dsn, f"UPDATE item SET text = 'b{number}' WHERE id % 4 = {number}")
                assert run_command(fleet, "create", NAME, "--incremental")[0] == 0
            # Otherwise the other would be the last that can be restored.
            assert run_command(fleet, "create", "later")[0] == 0
            yield Chain(fleet, folder, spark, count())
    finally:
        stop_fleet(folder / "fleet", delete=True)


@dataclass(slots=True)
class Suspension:
    """Counts the command's calls to the store; before the call `at`, the others act."""

    act: Callable[[], None]
    at: int
    calls: int = 0
    is_acting: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            monkeypatch.setattr(LocalStore, name, self._counting(getattr(LocalStore, name)))
        # It is not renewed while the command is suspended.
        monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: LocalStore, *arguments: Any) -> Any:
            if not self.is_acting:
                self.calls += 1
                if self.calls == self.at:
                    self.is_acting = True
                    self.act()
                    self.is_acting = False
            return real(store, *arguments)

        return call


@dataclass(frozen=True, slots=True)
class Ended:
    """How the suspended command ended: at which call it was suspended, its exit code, and its document."""

    at: int
    code: int
    document: dict[str, Any]
    fleet: Fleet

    def assert_one_of(self, ends: Ends) -> None:
        slug = str(self.document.get("error", "")) if self.code else ""
        assert (self.code, slug) in ends, (self.at, self.code, self.document)
        text = str(self.document.get("message", ""))
        assert text.startswith(ends[self.code, slug]), (self.at, text)
        assert "snapshot repair" not in str(self.document.get("hint")), (self.at, self.document)


def suspend(
    chain: Chain,
    monkeypatch: pytest.MonkeyPatch,
    words: Callable[[Fleet], tuple[str, ...]],
    others: str,
    step: int,
    prepare: Callable[[Fleet], None] = lambda _: None,
) -> Iterator[Ended]:
    """Run the command again and again, each time suspended `step` calls later, until it is done before that."""
    for at in count(1, step):
        fleet = chain.copied()
        prepare(fleet)

        acted: list[tuple[int, dict[str, Any]]] = []

        def act(fleet: Fleet = fleet, acted: list[tuple[int, dict[str, Any]]] = acted) -> None:
            acted.extend(run_command(fleet, *command) for command in OTHERS[others])

        suspension = Suspension(act, at)
        with monkeypatch.context() as patched:
            suspension.install(patched)
            code, document = run_here(fleet, *words(fleet), spark=chain.spark)
        assert all(other == 0 for other, _ in acted), acted
        if suspension.calls < at:
            assert at > step
            assert code == 0, document
            return
        yield Ended(at, code, document, fleet)


GIVEN_UP: Ends = {(3, "merged-away"): f"increment 3 of {NAME} was given up: the chain begins at increment 4"}
BEGINS_LATER: Ends = {
    (7, "beginning-given-up"): f"the restore points of {NAME} before increment 2 were given up while this command"
}


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        ("gc", {**SETTLED, **DONE}),
        ("the same merge", {**DONE, (7, "merge-superseded"): "operation "}),
        (
            "the same merge, all of it",
            {
                **DONE,
                (7, "operation-settled"): "another process has continued operation ",
                (7, "merge-superseded"): "operation ",
                (7, "beginning-given-up"): f"the restore points of {NAME} before increment 3 were given up while this",
            },
        ),
        ("a later merge", {**GIVEN_UP, **SETTLED}),
        ("an earlier merge", {**BEGINS_LATER, **SETTLED, **DONE}),
        ("delete", DELETED),
        ("prune", PRUNED),
    ],
    ids=["gc", "same", "whole", "later", "earlier", "delete", "prune"],
)
@pytest.mark.parametrize("step", STEPS)
def test_a_suspended_merge_says_what_others_have_done(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, others: str, ends: Ends, step: int
) -> None:
    found = list(suspend(chain, monkeypatch, lambda _: ("merge", NAME, "--to", "3"), others, step))
    # At its last calls, the merge is stored already.
    while found[-1].code == 0 and len(found) > 1:
        found.pop()
    for ended in found:
        ended.assert_one_of(ends)
    if others == "gc":
        assert any(ended.code == 7 for ended in found)


@pytest.mark.parametrize(
    ("others", "ends"),
    [("gc", {**SETTLED, **DONE}), ("delete", DELETED), ("prune", {**SETTLED, **PRUNED, **OUTDATED, **DONE})],
    ids=["gc", "delete", "prune"],
)
@pytest.mark.parametrize("step", STEPS)
def test_a_suspended_repair_says_what_others_have_done(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: str, ends: Ends, step: int
) -> None:
    """What is damaged is named as such by its plan, but not what others have removed."""
    shutil.copytree(chain.folder / "store", tmp_path / "other")

    def damage(fleet: Fleet) -> None:
        file = min((Path(fleet.store.url.removeprefix("file://")) / "snapshots" / NAME / "wal").rglob("*.parquet"))
        body = bytearray(file.read_bytes())
        body[len(body) // 2] ^= 1
        file.chmod(0o644)
        file.write_bytes(body)

    words = ("repair", NAME, "--from", f"file://{tmp_path}/other", "--yes")
    found = list(suspend(chain, monkeypatch, lambda _: words, others, step, damage))
    while found[-1].code == 0 and len(found) > 1:
        found.pop()
    for ended in found:
        ended.assert_one_of(ends)


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        ("a later merge", {**GIVEN_UP, **DONE}),
        ("an earlier merge", {**BEGINS_LATER, **DONE}),
        ("delete", {**DELETED, **DONE}),
        ("prune", {**PRUNED, **DONE}),
        ("gc", DONE),
    ],
    ids=["later", "earlier", "delete", "prune", "gc"],
)
@pytest.mark.parametrize(("kind", "step"), first([("restore", 15), ("restore", 4), ("drill", 15)]))
def test_a_suspended_restore_names_the_increment_and_leaves_nothing(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, kind: str, step: int, others: str, ends: Ends
) -> None:
    def words(_: Fleet) -> tuple[str, ...]:
        return (kind, NAME, "--increment", "3", "--to", str(chain.target), *["--yes"] * (kind == "restore"))

    def prepare(fleet: Fleet) -> None:
        chain.drop_restored()
        if kind == "drill":
            with fleet.path.open("a") as file:
                file.write('\n[[drill.assertion]]\nnode = "s1"\nsql = "SELECT count(*) FROM item"\nexpected = 200\n')

    try:
        for ended in suspend(chain, monkeypatch, words, others, step, prepare):
            ended.assert_one_of(ends)
            assert (chain.databases() == [DATABASE]) is (ended.code == 0 and kind == "restore"), ended
    finally:
        chain.drop_restored()


def test_a_restore_that_has_begun_to_load_says_that_its_databases_were_removed(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = chain.copied()
    monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)
    real = leases.hold_lease

    @contextmanager
    def hold(*arguments: Any, **options: Any) -> Iterator[leases.HeldLease]:
        with real(*arguments, **options) as lease:
            for command in OTHERS["delete"]:
                assert run_command(fleet, *command)[0] == 0
            yield lease

    monkeypatch.setattr("cutline.restore.run.restore.hold_lease", hold)
    code, document = run_here(fleet, "restore", NAME, "--to", str(chain.target), "--yes", spark=chain.spark)
    assert (code, document["error"]) == (3, "snapshot-deleted")
    assert document["message"].endswith("; everything that the restore created was removed")
    assert chain.databases() == []


@pytest.mark.parametrize("others", ["a later merge", "delete", "prune", "gc"])
@pytest.mark.parametrize(("command", "step"), [("check", 15), ("copy", 50), ("gc", 15)], ids=["check", "copy", "gc"])
def test_a_suspended_reader_calls_nothing_damaged_that_others_have_removed(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, step: int, others: str
) -> None:
    numbers = count()

    def words(_: Fleet) -> tuple[str, ...]:
        if command == "copy":
            return ("copy", NAME, "--to", f"file://{tmp_path}/second-{next(numbers)}")
        return GC if command == "gc" else ("check", NAME)

    text = chain.fleet.path.read_text()
    chain.fleet.path.write_text(f'{text}\n[check]\nallow = ["one-copy"]\n')
    try:
        for ended in suspend(chain, monkeypatch, words, others, step):
            assert ended.code in (0, 1, 3, 4), ended
            if ended.code == 3:
                ended.assert_one_of({**DELETED, **PRUNED})
                continue
            copied = [one for store in ended.document.get("stores", ()) for one in store["snapshots"]]
            problems = [problem for one in copied for problem in one["problems"]]
            assert {problem["kind"] for problem in problems} <= {"given-up"}, ended
            assert (ended.code == 1) is bool(problems), ended
            checked = ended.document["snapshots"] if command == "check" else []
            assert not any(one["conflicts"] for one in checked), ended
    finally:
        chain.fleet.path.write_text(text)
