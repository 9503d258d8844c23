"""An operation loses the answer to each of its creates in turn: its result is true, and no late arrival changes it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from msgspec import structs

import cutline.snapshots.records.proven_chains as chains
import cutline.snapshots.records.proven_chains as commits
import cutline.storage.storing as storing
from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.lsn import Lsn
from cutline.snapshots.operations.committing import CommitIndeterminateError
from cutline.snapshots.operations.majority import claim_majority
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import Operation, commit_operation, new_operation, record_operation
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.end_marks import EndMark, end_key, has_end, mark_end
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.proven_chains import commit_key, snapshot_names
from cutline.snapshots.records.store_identity import FLEET_KEY, ensure_identity
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import AnswerLostError, ObjectExistsError, ObjectStore, StoreUnreachableError
from cutline.storage.storing import StoreAnswersLostError, create_or_find
from cutline.wal.segments.archive import SegmentRange, archive_prefix, segment_key
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment
from tests.commands.watching import Watching
from tests.unit.made_commits import commit, identity, unused_url

ROOT = Path(__file__).parent.parent.parent
FLEET = Fleet(Path("fleet.toml"), "shop", StoreLocation("memory://"), (), "exact", GroupRules(), "local", {})
OTHER = EndMark("weekly", "op-9", 3, "s1", "2026-11-20T00:00:00.000Z")
EMPTY = pa.Table.from_batches([], SEGMENT_SCHEMA)

# The fate of a put whose answer was lost: stored at once, never, or late, after others have continued.
Fate = Literal["stored", "never", "late"]
FATES: tuple[Fate, ...] = ("stored", "never", "late")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Losing(InMemoryStore):
    """A store that loses the answer to create number `lost`; `held` has the puts that have not arrived."""

    lost: int = -1
    fate: Fate = "stored"
    created: list[str] = field(default_factory=list)
    held: dict[str, bytes] = field(default_factory=dict)

    def create(self, key: str, body: bytes) -> None:
        self.created.append(key)
        if len(self.created) - 1 != self.lost:
            InMemoryStore.create(self, key, body)
            return
        if self.fate == "stored":
            InMemoryStore.create(self, key, body)
        elif self.fate == "late":
            self.held[key] = body
        raise AnswerLostError(url=self.url, key=key, reason="the connection was lost")

    def deliver(self) -> list[str]:
        """Let the held puts arrive; return the keys that were taken by then."""
        refused = []
        for key, body in self.held.items():
            try:
                InMemoryStore.create(self, key, body)
            except ObjectExistsError:
                refused.append(key)
        return refused


@dataclass(slots=True)
class Life:
    """One operation, from an empty store to its end."""

    store: ObjectStore
    operation: str = ""
    watching: Watching = field(default_factory=Watching)
    undone: bool = False

    def run(self) -> None:
        """Create all that a full snapshot creates, and mark another chain as ended on the way."""
        ensure_identity(self.store, FLEET)
        claim_majority(self.store, {"a": identity("a")})
        operation = Operation(new_operation("create", "daily", 0, ("a",)))
        self.operation = operation.id
        with record_operation(self.store, operation, self.undo, self.watching):
            held = SegmentRange("a", operation.id, Lsn(0), Lsn(100))
            create_segment(
                self.store, archive_prefix("daily", "a", operation.id), 1, held, (EMPTY, EMPTY), continued=None
            )
            mark_end(self.store, OTHER)
            made = structs.replace(commit(0, chain=operation.id), operation=operation.id)
            commit_operation(self.store, operation, made)

    def undo(self) -> bool:
        self.undone = True
        return True

    def keys(self) -> list[str]:
        """The keys that it creates, in order."""
        return [
            FLEET_KEY, "baselines/0000000000000001.json", operation_key(self.operation, "intent"),
            segment_key(archive_prefix("daily", "a", self.operation), 1), end_key("weekly", "op-9"),
            commit_key("daily", 0), operation_key(self.operation, "outcome"),
        ]  # fmt: skip


IDENTITY, BASELINE, INTENT, SEGMENT, MARK, COMMIT, OUTCOME = range(7)


def test_an_operation_creates_the_keys_that_these_tests_know() -> None:
    store = Losing(unused_url())
    life = Life(store)
    life.run()
    assert store.created == life.keys()
    assert snapshot_names(store) == ["daily"]


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("lost", range(7))
def test_the_reported_result_is_true_and_stays_true_after_any_lost_answer(lost: int, fate: Fate) -> None:
    store = Losing(unused_url(), lost=lost, fate=fate)
    life = Life(store)
    code, error = 0, None
    try:
        life.run()
    except SnapshotError as raised:
        code, error = raised.exit_code, raised
    expected = 0 if fate == "stored" or lost == OUTCOME else 5 if lost == COMMIT else 6
    assert code == expected, error
    assert (snapshot_names(store) == ["daily"]) == (code == 0)
    # An indeterminate result is not undone; a failure is, if there was something to undo.
    assert life.undone == (code == 6 and lost in (SEGMENT, MARK))
    if error:
        assert error.hint
        assert error.details["object" if lost != COMMIT else "operation"]
    settled = Watching()
    settle_operations(store, FLEET, settled)
    if lost == OUTCOME and fate != "stored":
        assert any(life.operation in note for note in life.watching.notes)
        assert settled.notes == [f"operation {life.operation} had committed snapshot daily"]
    if code == 5:
        # This fleet.toml lists no nodes, so none of the operation's can be cleaned up.
        ended, unlisted = settled.notes
        assert ended == f"operation {life.operation} ended without committing snapshot daily"
        assert unlisted.startswith("node a: not in fleet.toml any more: ")
    refused = store.deliver()
    assert refused == ([life.keys()[lost]] if fate == "late" and lost in (COMMIT, OUTCOME) else [])
    # A late arrival does not change the list, and the next operation commits.
    assert (snapshot_names(store) == ["daily"]) == (code == 0)
    if code:
        settle_operations(store, FLEET, Watching())
        check_name_is_free(store)
    assert read_open_intents(store) == []
    if fate == "late" and lost == MARK:
        assert has_end(store, "weekly", "op-9")


def check_name_is_free(store: ObjectStore) -> None:
    """Check that the next operation for this name commits."""
    intent = new_operation("create", "daily", 0, ("a",))
    operation = Operation(structs.replace(intent, turn=commits.free_turn(store, "daily", 0)))
    with record_operation(store, operation):
        made = structs.replace(commit(0, chain=operation.id), operation=operation.id)
        commit_operation(store, operation, made)
    assert chains.read_chain(store, "daily").full.operation == operation.id


def test_a_commit_whose_answer_was_lost_leaves_its_operation_open() -> None:
    store = Losing(unused_url(), lost=COMMIT, fate="late")
    life = Life(store)
    with pytest.raises(CommitIndeterminateError):
        life.run()
    assert [one.id for one in read_open_intents(store)] == [life.operation]
    # The put arrives before anybody decides the operation, so it counts.
    assert store.deliver() == []
    settled = Watching()
    settle_operations(store, FLEET, settled)
    assert settled.notes == [f"operation {life.operation} had committed snapshot daily"]
    assert snapshot_names(store) == ["daily"]


def test_an_existing_object_counts_as_created_only_if_it_is_identical() -> None:
    store = InMemoryStore(unused_url())
    create_or_find(store, "a", b"body")
    create_or_find(store, "a", b"body")
    for other in (b"bodies", b"ydob"):
        with pytest.raises(ObjectExistsError):
            create_or_find(store, "a", other)


def test_another_writers_object_is_not_taken_for_the_one_whose_answer_was_lost() -> None:
    store = Losing(unused_url(), lost=1, fate="never")
    store.create("a", b"another")
    with pytest.raises(ObjectExistsError):
        create_or_find(store, "a", b"body")


@dataclass(frozen=True, slots=True)
class Silent(InMemoryStore):
    """A store that loses an answer and can't be reached afterwards."""

    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body)
        raise AnswerLostError(url=self.url, key=key, reason="the connection was lost")

    def size(self, key: str) -> int:
        raise StoreUnreachableError(url=self.url, reason=f"no answer for {key}")


def test_a_store_that_stays_silent_after_a_lost_answer_is_unreachable_and_not_indeterminate() -> None:
    with pytest.raises(StoreAnswersLostError) as raised:
        create_or_find(Silent(unused_url()), "a", b"body")
    assert (raised.value.exit_code, raised.value.slug) == (6, "store-answers-lost")


def test_an_unreadable_intent_is_named_and_blocks_nobody() -> None:
    store = InMemoryStore(unused_url())
    foreign = {"schema": "cutline/operation/9", "operation": "op-9"}
    for operation, body in (("op-8", b"{"), ("op-9", seal(foreign))):
        store.create(operation_key(operation, "intent"), body)
    watching = Watching()
    settle_operations(store, FLEET, watching)
    assert len(watching.notes) == 2
    for note, operation, hint in zip(watching.notes, ("op-8", "op-9"), ("a copy", "newer version"), strict=True):
        assert operation_key(operation, "intent") in note
        assert hint in note
    check_name_is_free(store)


# These modules create without create_or_find, so they decide what a lost answer means (docs/store-format.md).
DECIDING = {"snapshots/operations/committing.py"}


def test_all_other_modules_create_with_create_or_find() -> None:
    found = set()
    for package in ("fleet", "nodes", "spark", "wal", "snapshots", "check", "restore", "cli"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("store.create"):
                    found.add(str(path.relative_to(ROOT)))
    assert found
    assert found <= DECIDING, f"use create_or_find: {found - DECIDING}"
