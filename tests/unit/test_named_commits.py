"""A chain is continued without proving commits that its newest increment, or a create, names; only after just those."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256

import pytest
from msgspec import UNSET, structs

from cutline.nodes.groups import Column, Group
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.operation import (
    Operation,
    commit_operation,
    new_operation,
    record_operation,
    record_outcome,
)
from cutline.snapshots.records import proven_chains
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, DefinitionChanges, FullSnapshot, Increment, Previous
from cutline.snapshots.records.documents import ManifestError, content_of, seal, unseal
from cutline.snapshots.records.operation_records import operation_key, read_intent, read_outcome
from cutline.snapshots.records.proven_chains import (
    commit_key,
    naming_contradictions,
    read_chain,
    read_commit,
    read_continued,
    read_continued_full,
    read_newest_part,
)
from cutline.storage.digest import digest
from cutline.storage.errors import StoppedError
from cutline.storage.memory import InMemoryStore
from tests.unit.made_commits import commit, counted, memory
from tests.unit.test_newest import store_chain

NAME = "daily"
FULL = commit_key(NAME, 0)
COLUMNS = (Column("id", "bigint", 20, -1, 0, 1), Column("note", "text", 25, -1, 1, 2))


def tables(count: int) -> tuple[Group, ...]:
    """Tables with equal columns, each of which has its own objects for them."""
    return tuple(
        Group(number, "public", f"table_{number:03}", "default", 1, tuple(map(structs.replace, COLUMNS)))
        for number in range(1, count + 1)
    )


def put_full(store: InMemoryStore, full: FullSnapshot) -> None:
    store.delete(FULL)
    store.create(FULL, seal(full))


def full_of(store: InMemoryStore) -> FullSnapshot:
    full = read_commit(store, NAME, 0)
    assert isinstance(full, FullSnapshot)
    return full


def broken(full: FullSnapshot) -> FullSnapshot:
    """A commit with a valid digest that contradicts itself: its only group twice has the same number."""
    return structs.replace(full, groups={"a": (*tables(1), *tables(1))})


def put_newest_naming(store: InMemoryStore, full: FullSnapshot) -> None:
    """Replace increment 1, the newest, by one that names this full snapshot's commit."""
    newest, named = read_commit(store, NAME, 1), unseal("", seal(full))[1]
    assert isinstance(newest, Increment)
    assert newest.history is not None
    assert newest.previous is not None
    changed = structs.replace(
        newest,
        history=structs.replace(newest.history, full=named),
        previous=Previous(newest.previous.operation, named),
    )
    store.delete(commit_key(NAME, 1))
    store.create(commit_key(NAME, 1), seal(changed))


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small commits of these tests count as large."""
    monkeypatch.setattr(proven_chains, "LARGE_BYTES", 0)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The increments whose commits are proven, in order."""
    found: list[int] = []
    check = proven_chains.check_commit

    def note(one: Commit) -> None:
        found.append(one.increment)
        check(one)

    monkeypatch.setattr(proven_chains, "check_commit", note)
    return found


def test_only_the_newest_commit_is_proven_to_continue_a_chain(proven: list[int]) -> None:
    store = store_chain(5, redefining=(2, 3))
    proven.clear()
    continued = read_continued(store, NAME, read_continued_full(store, NAME))
    assert set(proven) == {5}
    proven.clear()
    newest = read_newest_part(store, NAME)
    assert sorted(set(proven)) == [0, 2, 3, 5]
    assert continued == newest
    proven.clear()
    assert read_chain(store, NAME).last == newest.last
    assert sorted(proven) == [0, 1, 2, 3, 4, 5]


def test_a_small_full_snapshot_is_proven_without_further_requests(
    proven: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_chain(3)
    monkeypatch.setattr(proven_chains, "LARGE_BYTES", len(content_of(full_of(store))) + 1)
    proven.clear()
    read_continued_full(store, NAME)
    assert proven == [0]


def test_without_an_increment_or_an_outcome_the_full_snapshot_is_proven(proven: list[int]) -> None:
    store = store_chain(0)
    proven.clear()
    assert read_continued_full(store, NAME) == full_of(store)
    assert proven[0] == 0
    put_full(store, broken(full_of(store)))
    with pytest.raises(ManifestError, match="twice"):
        read_continued_full(store, NAME)


def store_of_a_full() -> InMemoryStore:
    """A full snapshot as its create leaves it, without an increment."""
    store = memory()
    take(store, commit(0))
    return store


def take(store: InMemoryStore, made: Commit, then: Callable[[], None] = lambda: None) -> str:
    """Store the commit as a command does, and return the id of its operation; `then` follows the commit."""
    operation = Operation(new_operation("create", NAME, made.increment, ("a",)))
    with record_operation(store, operation):
        commit_operation(store, operation, counted(structs.replace(made, operation=operation.id)))
        then()
    return operation.id


def test_a_full_snapshot_that_its_own_create_has_proven_is_not_proven_for_the_first_increment(
    proven: list[int],
) -> None:
    store = store_of_a_full()
    wanted = full_of(store)
    proven.clear()
    assert read_continued_full(store, NAME) == wanted
    assert read_continued(store, NAME).last == wanted
    assert proven == []


def test_a_full_snapshot_other_than_its_create_has_recorded_is_proven_and_refused(proven: list[int]) -> None:
    store = store_of_a_full()
    full = full_of(store)
    put_full(store, structs.replace(full, comment="another, and valid"))
    proven.clear()
    assert read_continued_full(store, NAME).comment == "another, and valid"
    assert 0 in proven
    put_full(store, broken(full))
    with pytest.raises(ManifestError, match="twice"):
        read_continued_full(store, NAME)


@pytest.mark.parametrize("body", [b"", b"x" * 1000, None, "settled"])
def test_without_a_digest_in_the_outcome_the_full_snapshot_is_proven(
    body: bytes | str | None, proven: list[int]
) -> None:
    """Also if another command has found the commit of a create that died, and stored its outcome."""
    store = store_of_a_full()
    operation = full_of(store).operation
    key = operation_key(operation, "outcome")
    store.delete(key)
    if body == "settled":
        record_outcome(store, read_intent(store, operation), "done", "found committed")
    elif isinstance(body, bytes):
        store.create(key, body)
    wanted = full_of(store)
    proven.clear()
    assert read_continued_full(store, NAME) == wanted
    assert 0 in proven


def test_only_the_outcome_of_a_full_snapshot_names_its_commit() -> None:
    store = memory()
    full = read_outcome(store, take(store, commit(0)))
    text, separator, _ = store.read_range(FULL, 0, 1 << 20).rpartition(b',"digest":')
    assert full
    assert separator
    assert full.commit_digest == sha256(text + b"}").hexdigest()
    chain = read_chain(store, NAME)
    previous = Previous(chain.last.operation, chain.last.digest)
    made = structs.replace(commit(1, chain.full.chain), previous=previous, history=chain.next_history)
    increment = read_outcome(store, take(store, made))
    assert increment
    assert increment.commit_digest is UNSET


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize("then", [interrupt, fail])
def test_a_create_that_fails_after_its_commit_has_named_it(then: Callable[[], None], proven: list[int]) -> None:
    store = memory()
    with pytest.raises((StoppedError, OSError)):
        take(store, commit(0), then)
    full = full_of(store)
    outcome = read_outcome(store, full.operation)
    assert outcome
    assert outcome.commit_digest == full.digest
    proven.clear()
    assert read_continued_full(store, NAME) == full
    assert proven == []


def test_the_outcome_names_the_commit_that_is_stored_although_another_process_of_the_operation_wrote_it() -> None:
    """A create that seemed dead was resumed, and both processes commit: the second one gets the first one's commit."""
    store = memory()
    operation = Operation(new_operation("create", NAME, 0, ("a",)))
    ours, theirs = (
        counted(structs.replace(commit(0), operation=operation.id, comment=comment)) for comment in ("ours", "theirs")
    )
    with record_operation(store, operation):
        store.create(FULL, seal(theirs))
        found = commit_operation(store, operation, ours)
    assert found == full_of(store)
    assert found.comment == "theirs"
    outcome = read_outcome(store, operation.id)
    assert outcome
    assert outcome.commit_digest == found.digest != unseal("", seal(ours))[1]


@pytest.mark.parametrize("operation", [b'"operation":"\xff"', b'"operation":7', b'"operation":' + b"[" * 100_000, b""])
def test_a_full_snapshot_whose_writer_can_not_be_read_is_refused(operation: bytes) -> None:
    store = store_of_a_full()
    text, _, _ = store.read_range(FULL, 0, 1 << 20).rpartition(b',"digest":')
    written = f'"operation":"{full_of(store).operation}"'.encode()
    assert written in text
    content = text.replace(written, operation, 1) if operation else text.replace(written + b",", b"", 1)
    store.delete(FULL)
    store.create(FULL, content + f',"digest":"{digest(content + b"}")}"}}'.encode())
    with pytest.raises(ManifestError, match=r"snapshot\.json"):
        read_continued_full(store, NAME)


def test_a_full_snapshot_that_the_newest_increment_does_not_name_is_proven_and_refused() -> None:
    store = store_chain(2)
    full = full_of(store)
    put_full(store, broken(full))
    with pytest.raises(ManifestError, match="twice"):
        read_continued_full(store, NAME)
    put_full(store, structs.replace(full, comment="another, and valid"))
    found = read_continued_full(store, NAME)
    assert found.comment == "another, and valid"
    for given in (found, None):
        with pytest.raises(ManifestError, match=r"snapshot.json is not the commit that increment 2 of daily names"):
            read_continued(store, NAME, given)


def test_a_changed_byte_of_a_named_commit_is_found() -> None:
    store = store_chain(1, redefining=())
    body = store.read_range(FULL, 0, 1 << 20)
    store.delete(FULL)
    store.create(FULL, body.replace(b'"seconds":1.0', b'"seconds":2.0'))
    with pytest.raises(ManifestError, match="its contents have changed since it was written"):
        read_continued_full(store, NAME)


def test_another_valid_commit_of_a_changed_definition_is_refused() -> None:
    store = store_chain(4, redefining=(2,))
    full = read_continued_full(store, NAME)
    changed = structs.replace(read_commit(store, NAME, 2), comment="another")
    store.delete(commit_key(NAME, 2))
    store.create(commit_key(NAME, 2), seal(changed))
    with pytest.raises(ManifestError, match=r"0002\.json is not the commit that increment 4 of daily names"):
        read_continued(store, NAME, full)


def test_the_newest_increment_itself_is_proven() -> None:
    store = store_chain(2)
    newest = read_commit(store, NAME, 2)
    wrong = structs.replace(newest, counts=newest.counts | {"changes": 7})
    store.delete(commit_key(NAME, 2))
    store.create(commit_key(NAME, 2), seal(wrong))
    full = read_continued_full(store, NAME)
    with pytest.raises(ManifestError, match=r"counts\.changes is 7"):
        read_continued(store, NAME, full)


def test_a_damaged_newest_increment_vouches_for_nothing(proven: list[int]) -> None:
    store = store_chain(2)
    store.delete(commit_key(NAME, 2))
    store.create(commit_key(NAME, 2), b"x" * 1000)
    proven.clear()
    full = read_continued_full(store, NAME)
    assert 0 in proven
    with pytest.raises(ManifestError, match=r"0002\.json"):
        read_continued(store, NAME, full)


def test_commands_that_prove_a_chain_refuse_a_broken_commit_that_an_increment_names() -> None:
    store = store_chain(1)
    wrong = broken(full_of(store))
    put_newest_naming(store, wrong)
    put_full(store, wrong)
    for read in (read_chain, read_newest_part):
        with pytest.raises(ManifestError, match="twice"):
            read(store, NAME)


def test_equal_columns_are_read_once_and_shared() -> None:
    store = memory()
    full = structs.replace(commit(0), groups={"a": tables(3)})
    put_commit(store, counted(full))
    found = full_of(store)
    assert found.groups == full.groups
    assert len({id(group.columns) for group in found.groups["a"]}) == 1
    assert Chain(found).groups("a") == full.groups["a"]


@pytest.mark.parametrize(
    ("was", "now", "error"),
    [
        (b'"type_oid":25', b'"type_oid":"25"', "Expected `int`"),
        (b'"type_oid":25', b'"type_oid":25,"more":1', "unknown field `more`"),
        (b'"type_oid":25', b'"type_oid":25,"type_oid":25', "occurs twice"),
        (b'"type":"text",', b"", "missing required field `type`"),
        (b'"position":1', b'"position":7', "positions of its columns"),
    ],
)
def test_columns_of_a_single_group_that_are_invalid_are_refused(was: bytes, now: bytes, error: str) -> None:
    content = content_of(counted(structs.replace(commit(0), groups={"a": tables(3)})))
    before, separator, after = content.rpartition(was)
    assert separator
    changed = before + now + after
    json.loads(changed)
    store = memory()
    store.create(FULL, changed[:-1] + f',"digest":"{digest(changed)}"}}'.encode())
    with pytest.raises(ManifestError, match=error):
        read_commit(store, NAME, 0)


def test_definitions_of_the_newest_increment_are_proven() -> None:
    store = store_chain(1)
    newest = read_commit(store, NAME, 1)
    changes = DefinitionChanges(gone={"a": (9,)})
    store.delete(commit_key(NAME, 1))
    store.create(commit_key(NAME, 1), seal(counted(structs.replace(newest, definition_changes=changes))))
    full = read_continued_full(store, NAME)
    with pytest.raises(ManifestError, match="number without a definition"):
        read_continued(store, NAME, full)


def put_changed(store: InMemoryStore, number: int, **values: object) -> None:
    """Exchange an increment and those after it, with digests that fit, as somebody does who can write to the store."""
    chain = read_chain(store, NAME)
    last = chain.last.increment
    changed = Chain(chain.full, chain.increments[: number - 1])
    for one in chain.increments[number - 1 :]:
        made = structs.replace(
            one, previous=Previous(changed.last.operation, changed.last.digest), history=changed.next_history,
            **(values if one.increment == number else {}),
        )  # fmt: skip
        store.delete(commit_key(NAME, one.increment))
        store.create(commit_key(NAME, one.increment), body := seal(made))
        made = structs.replace(made, digest=unseal("", body)[1])
        changed = Chain(chain.full, (*changed.increments, made))
    assert changed.last.increment == last


@pytest.mark.parametrize("read", [read_chain, read_newest_part, read_continued])
def test_an_id_that_is_given_to_no_node_of_the_chain_is_refused_by_all_that_read(
    read: Callable[[InMemoryStore, str], Chain],
) -> None:
    """Also in a part of the chain, which has all nodes: the next increment would look for the node in vain."""
    store = store_chain(3, redefining=[1])
    read(store, NAME)
    put_changed(store, 3, renamed={"s9": "other"})
    with pytest.raises(ManifestError, match="renamed names s9, which is not in the snapshot"):
        read(store, NAME)


def test_an_increment_that_fails_over_a_commit_that_was_not_proven_names_it() -> None:
    store = store_chain(3, redefining=[1])
    with pytest.raises(KeyError, match="its own"), naming_contradictions(store, NAME):
        raise KeyError("its own")
    first = read_commit(store, NAME, 1)
    assert first.definition_changes
    changes = structs.replace(first.definition_changes, gone={"s9": (1,)})
    put_changed(store, 1, definition_changes=changes)
    read_continued(store, NAME)
    with pytest.raises(ManifestError, match=commit_key(NAME, 1)) as raised, naming_contradictions(store, NAME):
        raise KeyError("s9")
    assert "names a node that is not in the snapshot" in raised.value.message
