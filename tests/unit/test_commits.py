"""Committing and reading back: which create wins, what a lost answer means, which chains are complete."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from msgspec import structs
from msgspec.structs import replace

import cutline.storage.storing as storing
from cutline.check.structure import check_structure
from cutline.fleet.record import Time
from cutline.snapshots.operations.committing import CommitIndeterminateError, put_commit
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Increment, Previous
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.proven_chains import (
    SnapshotExistsError,
    SnapshotMissingError,
    check_name,
    commit_key,
    read_chain,
    read_commit,
    read_lost_since,
    snapshot_names,
)
from cutline.snapshots.records.tombstones import RestorePoint
from cutline.snapshots.removal.survey import survey_snapshot
from cutline.storage.errors import UsageError
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import AnswerLostError, EncryptionIgnoredError, ObjectExistsError, StoreUnreachableError
from cutline.wal.segments.archive import ArchiveError
from tests.unit.made_chains import store_chain
from tests.unit.made_commits import as_read, commit, full_commit, increment_commit, memory, unused_url


@dataclass(frozen=True, slots=True)
class CountingStore(InMemoryStore):
    """A store that notes the keys that it is asked for, and gives up after a thousand."""

    asked: list[str] = field(default_factory=list)

    def read(self, key: str) -> bytes:
        self.asked.append(key)
        if len(self.asked) > 1000:
            raise StoreUnreachableError(url=self.url, reason="too many requests")
        return InMemoryStore.read(self, key)


def test_a_commit_under_the_key_of_another_is_refused() -> None:
    store = memory()
    store.create(commit_key("daily", 2), seal(commit(1)))
    with pytest.raises(ManifestError, match="is the commit of increment 1 of daily"):
        read_commit(store, "daily", 2)


def test_a_chain_is_read_up_to_an_increment() -> None:
    store = memory()
    for number in range(3):
        put_commit(store, commit(number))
    chain = read_chain(store, "daily")
    assert [one.increment for one in chain.commits] == [0, 1, 2]
    assert read_chain(store, "daily", 1) == chain.up_to(1)
    assert read_chain(store, "daily", 0) == chain.up_to(0) == Chain(chain.full)
    assert chain.full == as_read(commit(0))
    assert snapshot_names(store) == ["daily"]
    with pytest.raises(SnapshotMissingError, match="snapshot daily has no increment 3"):
        read_chain(store, "daily", 3)
    with pytest.raises(SnapshotMissingError, match="snapshot weekly"):
        read_chain(store, "weekly")


def test_the_commits_of_a_chain_share_what_they_repeat() -> None:
    """Otherwise each holds 64 summaries of others, which take more than all of its segments."""
    store = memory()
    put_commit(store, commit(0))
    for _ in range(5):
        chain = read_chain(store, "daily")
        last = chain.last
        made = commit(last.increment + 1)
        assert isinstance(made, Increment)
        previous = Previous(last.operation, last.digest)
        put_commit(store, structs.replace(made, previous=previous, history=chain.next_history))
    chain = read_chain(store, "daily")
    alone = [read_commit(store, "daily", number) for number in range(6)]
    # Nothing that a commit says is changed by that.
    assert chain.commits == tuple(alone)
    histories = [one.history for one in chain.increments if one.history]
    assert [len(history.recent) for history in histories] == [0, 1, 2, 3, 4]
    assert all(summary is histories[-1].recent[0] for summary in (history.recent[0] for history in histories[1:]))
    assert chain.increments[4].sequences is chain.increments[0].sequences


def test_a_history_that_differs_from_the_commits_is_refused() -> None:
    store = memory()
    put_commit(store, commit(0))
    for comment in ("", "forged"):
        chain = read_chain(store, "daily")
        last, made, history = chain.last, commit(chain.last.increment + 1), chain.next_history
        assert isinstance(made, Increment)
        recent = tuple(structs.replace(summary, comment=comment) for summary in history.recent)
        made = structs.replace(made, history=structs.replace(history, recent=recent))
        put_commit(store, structs.replace(made, previous=Previous(last.operation, last.digest)))
    with pytest.raises(ManifestError, match="history does not match the previous commits"):
        read_chain(store, "daily")


def test_a_chain_with_a_hole_or_a_commit_of_another_chain_is_refused() -> None:
    store = memory()
    put_commit(store, commit(0))
    put_commit(store, commit(2))
    with pytest.raises(SnapshotMissingError, match="increment 1"):
        read_chain(store, "daily")
    put_commit(store, commit(1, chain="another"))
    with pytest.raises(ManifestError, match="increment 1 of daily belongs to another chain"):
        read_chain(store, "daily")


@pytest.mark.parametrize("planted", [5_000_000, 9_999_999_999_999_999])
def test_the_number_in_a_name_does_not_decide_how_many_commits_are_looked_up(planted: int) -> None:
    store = CountingStore(unused_url())
    for number in range(3):
        put_commit(store, commit(number))
    store.create(commit_key("daily", planted), b"{}")
    store.asked.clear()
    for act in (lambda: read_chain(store, "daily"), lambda: read_chain(store, "daily", planted)):
        with pytest.raises(ManifestError, match=str(planted)):
            act()
    assert read_chain(store, "daily", 2).last.increment == 2
    surveyed = survey_snapshot(store, "daily")
    assert [one.increment for one in surveyed.points] == [0, 1, 2]
    assert str(planted) in surveyed.unreadable
    assert len(store.asked) < 100


def test_a_restore_point_is_as_old_as_its_cut_and_not_as_its_command() -> None:
    store, made_at = memory(), Time("2026-11-20T09:00:00.500Z")
    full, second = commit(0), commit(1)
    put_commit(store, structs.replace(full, cut=structs.replace(full.cut, made_at=made_at)))
    put_commit(store, second)
    surveyed = survey_snapshot(store, "daily")
    # They began at midnight.
    second_at = datetime(2026, 11, 20, 0, 0, 1, tzinfo=UTC)
    assert surveyed.moments == (datetime(2026, 11, 20, 9, 0, 0, 500_000, tzinfo=UTC), second_at)
    assert surveyed.points == (
        RestorePoint(0, full.created_at, made_at), RestorePoint(1, second.created_at, second.cut.made_at)
    )  # fmt: skip


@pytest.mark.parametrize("planted", [4, 9_999_999_999_999_999])
def test_a_commit_that_a_later_one_shows_to_be_lost_is_missing(planted: int) -> None:
    store = CountingStore(unused_url())
    for number in (0, 1, 2, planted):
        put_commit(store, commit(number))
    with pytest.raises(SnapshotMissingError, match="commit file is missing") as error:
        read_chain(store, "daily")
    assert error.value.details["increment"] == 3
    chain, report = check_structure(store, "", "daily", None, {})
    assert (chain is not None and chain.last.increment, report.increment) == (2, 2)
    assert report.conflicts[0].object == commit_key("daily", 3)
    assert [one.what for one in report.skipped] == ["increment 3 of daily and later"]


def test_a_chain_knows_its_segments_positions_and_excluded_transactions() -> None:
    chain = Chain(full_commit(), (increment_commit(1, position=150), increment_commit(2, position=250)))
    assert [one.number for one in chain.segments("b")] == [1, 2, 3]
    assert [chain.position(node) for node in ("a", "b")] == [250, 250]
    # Undecided at the last cut only, and all that were ever rolled back. A standby is like its primary.
    assert chain.excluded("a") == chain.excluded("b") == {12, 20, 21, 22}
    assert chain.up_to(1).excluded("a") == {11, 20, 21}
    assert (chain.shard_of("b"), chain.name) == ("a", "daily")
    chain.check_archive()
    hole = replace(chain, increments=chain.increments[1:])
    with pytest.raises(ArchiveError, match="archive has a gap"):
        hole.check_archive()


def test_of_two_creators_of_one_increment_one_wins() -> None:
    store = memory()
    put_commit(store, commit(0))
    with pytest.raises(SnapshotExistsError) as error:
        put_commit(store, structs.replace(commit(0), operation="another"))
    assert error.value.exit_code == 3
    assert read_commit(store, "daily", 0) == as_read(commit(0))
    # The same operation again: a lower layer lost the first answer.
    put_commit(store, commit(0))


@dataclass(frozen=True, slots=True)
class LosingStore(InMemoryStore):
    """A store that loses the answer to every create; `arrives` says whether the object is stored."""

    arrives: bool = True
    reads: bool = True

    def create(self, key: str, body: bytes) -> None:
        if self.arrives:
            InMemoryStore.create(self, key, body)
        raise AnswerLostError(url=self.url, key=key, reason="the connection was lost")

    def read(self, key: str) -> bytes:
        if not self.reads and key == commit_key("daily", 0):
            raise StoreUnreachableError(url=self.url, reason="it does not answer")
        return InMemoryStore.read(self, key)


def test_a_commit_whose_answer_was_lost_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.0, 0.0))
    put_commit(LosingStore(unused_url()), commit(0))
    for arrives, reads in ((False, True), (True, False)):
        store = LosingStore(unused_url(), arrives=arrives, reads=reads)
        with pytest.raises(CommitIndeterminateError) as error:
            put_commit(store, commit(0))
        assert error.value.exit_code == 5


@dataclass(frozen=True, slots=True)
class ReadingStore(InMemoryStore):
    """A store that keeps the keys that are read."""

    keys: list[str] = field(default_factory=list)

    def read(self, key: str) -> bytes:
        self.keys.append(key)
        return InMemoryStore.read(self, key)


def test_what_was_lost_since_is_found_without_reading_the_full_snapshot_again() -> None:
    store = ReadingStore(unused_url())
    store_chain(store, "daily", "2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z", "2020-01-03T00:00:00Z")
    chain = read_chain(store, "daily", 1)
    assert chain.last.increment == 1
    store.keys.clear()
    assert read_lost_since(store, chain) == ()
    assert commit_key("daily", 2) in store.keys
    assert commit_key("daily", 0) not in store.keys


class UnencryptingStore(InMemoryStore):
    """A store that stores every object, but not encrypted as asked."""

    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body)
        raise EncryptionIgnoredError(url=self.url, key=key, asked="aws:kms", found="unencrypted")


def test_a_commit_that_is_stored_unencrypted_exists() -> None:
    store = UnencryptingStore(unused_url())
    put_commit(store, commit(0))
    assert read_chain(store, "daily").last.operation == "op-0"


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a b", "a" * 64, "ä", "a\n"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "Daily-2026.11.20_x", "0" * 63])
def test_a_valid_name_is_accepted(name: str) -> None:
    assert check_name(name) == name


class GrowingStore(InMemoryStore):
    """A store in which another command commits increment 1 just before the increments are listed."""

    def list_children(self, prefix: str) -> list[str]:
        key = commit_key("daily", 1)
        if prefix.endswith("/increments") and not self.exists(key):
            put_commit(self, commit(1))
        return InMemoryStore.list_children(self, prefix)


def test_a_chain_may_grow_while_it_is_read() -> None:
    store = GrowingStore(unused_url())
    put_commit(store, commit(0))
    assert read_chain(store, "daily").last.increment == 1


class TruncatingStore(InMemoryStore):
    """A store that answers 412 to a put that it stored, as after a retry, and truncates the first body read."""

    truncates: bool = True

    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body)
        raise ObjectExistsError(url=self.url, key=key)

    def read(self, key: str) -> bytes:
        body = InMemoryStore.read(self, key)
        if not self.truncates or key != commit_key("daily", 0):
            return body
        object.__setattr__(self, "truncates", False)
        return body[:20]


def test_a_412_is_read_back_until_the_owner_of_the_commit_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.0, 0.0))
    store = TruncatingStore(unused_url())
    put_commit(store, commit(0))
    assert not store.truncates
