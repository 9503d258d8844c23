"""Every kind of JSON document in a store: whatever is wrong with one, its reader says so and names the object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapshots.operations.majority import read_baseline
from snapshots.operations.operation import pending_operations, read_recorded_commits
from snapshots.records.chain import Chain
from snapshots.records.commits import commit_key, find_place, read_chain
from snapshots.records.documents import ManifestError, seal
from snapshots.records.lost_chains import lost_key, read_lost
from snapshots.records.operation_records import read_intent
from snapshots.records.store_identity import (
    FLEET_KEY,
    ForeignSnapshotError,
    check_of_fleet,
    ensure_identity,
    read_identity,
)
from snapshots.records.tombstones import (
    read_mark,
    tombstone_key,
)
from storage.memory import InMemoryStore
from tests.unit.document_kinds import (
    DEFAULTED,
    FLEET,
    FULL,
    INTENT,
    KINDS,
    MAPS,
    OF_THEIR_TYPE,
    OPERATION,
    OPTIONAL,
    OUTCOME,
    increment_of,
    outcome_of,
    sealed_by_hand,
)
from tests.unit.made_commits import memory

CASES = [pytest.param(name, *case, id=name) for name, case in KINDS.items()]


def written(kind: str) -> tuple[bytes, str]:
    """The bytes of a document of that kind, and its key."""
    write, key, _ = KINDS[kind]
    store = memory()
    write(store)
    return store.read(key), key


def test_a_document_is_indented_by_one_and_ends_with_its_digest() -> None:
    values = [1, -2.5e300, None, True, [], {}, {'\u2028\U0001f600/"': "\x7f"}]
    content = {"schema": "cutline/odd/1", "a": values, "é\n": ""}
    assert seal(content | {"digest": "of before"}) == sealed_by_hand(content)


def damaged(kind: str, body: bytes) -> InMemoryStore:
    """A store that has `body` in the document's place, and the others as they were."""
    write, key, _ = KINDS[kind]
    store = memory()
    write(store)
    store.delete(key)
    store.create(key, body)
    return store


def refusal(kind: str, body: bytes) -> ManifestError:
    """The error of the reader; it must name the object and say what to do."""
    _, key, read = KINDS[kind]
    with pytest.raises(ManifestError) as error:
        read(damaged(kind, body))
    assert f"object {key}" in error.value.message, error.value.message
    assert error.value.details["object"] == key
    assert error.value.hint
    assert error.value.exit_code == 3
    return error.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_as_it_was_written_is_read(kind: str) -> None:
    body, _ = written(kind)
    assert KINDS[kind][2](damaged(kind, body))
    assert seal(json.loads(body)) == body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [
    b"", b"\x00", b"PAR1", b"\xff\xfe", b'{"schema": "\xc3', b"{}", b"[]", b"7", b"null", b'"text"', b"NaN", b"{",
    b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' * 700 + b"1" + b"}" * 700, b'{"a": ' + b"9" * 10_000 + b"}",
    b'{"schema": NaN}', b'{"schema": 1e999}', b'{"digest": [1]}', b'{"digest": null}', '{"ä": "ü"}'.encode(),
    '{"ä": "ü"}'.encode("utf-16"), b'{"schema": "\\ud800"}',
], ids=lambda body: repr(body[:12]))  # fmt: skip
def test_what_is_no_such_document_is_refused(kind: str, bad: bytes) -> None:
    refusal(kind, bad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_document_is_refused(kind: str) -> None:
    body, _ = written(kind)
    for length in {0, 1, len(body) // 2, len(body) - 70, len(body) - 2, len(body) - 1}:
        refusal(kind, body[:length])
    for more in (b"\n", b" ", b"}", body):
        refusal(kind, body + more)


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_byte_that_changed_is_found(kind: str, data: st.DataObject) -> None:
    body, _ = written(kind)
    place = data.draw(st.integers(0, len(body) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda one: one != body[place]))
    refusal(kind, body[:place] + bytes([byte]) + body[place + 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_there_twice_is_found(kind: str) -> None:
    body, _ = written(kind)
    first = body.split(b"\n")[1]
    refusal(kind, body.replace(b"{\n", b"{\n" + first + b"\n", 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_must_be_that_of_the_document(kind: str) -> None:
    body, _ = written(kind)
    document = json.loads(body)
    for digest in ("0" * 64, "", None, 7, [document["digest"]]):
        refusal(kind, json.dumps(document | {"digest": digest}, indent=1).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_or_unknown_version_is_said_to_be_one(kind: str) -> None:
    body, _ = written(kind)
    document = json.loads(body)
    name = document["schema"].rpartition("/")[0]
    for schema in (f"{name}/3", f"{name}/999999999", f"{name}/", "else", "", 1, None, [name]):
        assert "newer version" in refusal(kind, seal(document | {"schema": schema})).hint
    # Whose fixed form may be another, too.
    newer = json.dumps(document | {"schema": f"{name}/3"}).encode()
    assert f"a newer version of Cutline may have written it: its format is {name}/3" in refusal(kind, newer).hint


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, as the way to it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*path, name)
        yield from places_in(one, (*path, name))


def changed(document: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> bytes:
    """The document, sealed, with `change` made to what is at the place: called with what holds it, and its name."""
    copy = json.loads(json.dumps(document))
    holder = copy
    for name in path[:-1]:
        holder = holder[name]
    change(holder, path[-1])
    return sealed_by_hand(copy)


def read_places(document: Any) -> list[tuple[Any, ...]]:
    """All but the digest, which every document is sealed with anew."""
    return [path for path in places_in(document) if path != ("digest",)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_a_wrong_type_is_refused_wherever_it_is(kind: str) -> None:
    body, _ = written(kind)
    document = json.loads(body)
    for path in read_places(document):
        for wrong in ({"x": []}, [[]], True, 1.5, 10**30, float("nan"), "\ud800"):

            def put(holder: Any, name: Any, wrong: Any = wrong) -> None:
                wrong = wrong if not isinstance(wrong, dict) or not isinstance(holder[name], dict) else []
                holder[name] = wrong

            if (path[-1], wrong) not in OF_THEIR_TYPE:
                refusal(kind, changed(document, path, put))


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_missing_is_refused(kind: str) -> None:
    body, _ = written(kind)
    document = json.loads(body)
    absent = OPTIONAL.get(kind, set()) | DEFAULTED
    for path in read_places(document):
        if isinstance(path[-1], str) and path[-1] not in absent:
            refusal(kind, changed(document, path, lambda holder, name: holder.pop(name)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_unknown_is_refused_wherever_it_is(kind: str) -> None:
    """It may change what the others mean."""
    body, _ = written(kind)
    document = json.loads(body)

    def add(holder: Any, name: Any) -> None:
        holder[name]["novel"] = 7

    whole = refusal(kind, seal(document | {"novel": 7}))
    assert "unknown field `novel`" in whole.message
    assert "newer version" in whole.hint
    for path in read_places(document):
        if isinstance(place_of(document, path), dict) and path[-1] not in MAPS:
            message = refusal(kind, changed(document, path, add)).message
            assert f"unknown field `novel` - at `{as_text(path)}`" in message


def place_of(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def as_text(path: tuple[Any, ...]) -> str:
    """The place as an error names it; names in a map are not told."""
    parts = ["$"]
    for before, name in zip(("", *path), path, strict=False):
        parts.append("[...]" if before in MAPS else f"[{name}]" if isinstance(name, int) else f".{name}")
    return "".join(parts)


@pytest.mark.parametrize(("kind", "change", "message"), [
    ("increment", {"increment": "1"}, "Expected `int`, got `str` - at `$.increment`"),
    ("increment", {"sequences": {"a": [7]}}, "Expected `object`, got `int` - at `$.sequences[...][0]`"),
    ("full", {"base": {"a": 7, "b": "0/0"}}, "expected a WAL position, got int - at `$.base[...]`"),
    ("full", {"base": {"a": "7", "b": "0/0"}}, "'7' is not a WAL position - at `$.base[...]`"),
    ("full", {"counts": {"bytes": -1}}, "Expected `int` >= 0 - at `$.counts[...]`"),
    ("full", {"created_at": "2026-11-20"}, "- at `$.created_at`"),
    ("full", {"created_at": "2026-02-30T00:00:00Z"}, "day is out of range"),
    ("outcome", {"state": "over"}, "Invalid enum value 'over' - at `$.state`"),
    ("lease", {"expires_at": "2026-11-20T01:00:00"}, "- at `$.expires_at`"),
])  # fmt: skip
def test_what_is_wrong_is_named_by_its_place(kind: str, change: dict[str, Any], message: str) -> None:
    body, _ = written(kind)
    assert message in refusal(kind, seal(json.loads(body) | change)).message


def put_together(*found: tuple[str, bytes]) -> InMemoryStore:
    store = memory()
    for key, body in found:
        store.create(key, body)
    return store


def test_what_was_copied_from_elsewhere_is_refused() -> None:
    store = memory()
    increment_of(store)
    full, increment = store.read(commit_key("daily", 0)), store.read(commit_key("daily", 1))
    of_another = seal(json.loads(full) | {"operation": "op-x"})
    of_another_chain = seal(json.loads(increment) | {"chain": "op-x"})
    of_other_nodes = seal(json.loads(increment) | {"sequences": {"c": []}})
    first, second = commit_key("daily", 0), commit_key("daily", 1)
    for copied, key in (
        # Another snapshot's, another increment's, and an increment that was made for another full snapshot.
        (put_together((commit_key("weekly", 0), full)), commit_key("weekly", 0)),
        (put_together((first, increment)), first),
        (put_together((first, full), (second, full)), second),
        (put_together((first, of_another), (second, increment)), second),
        (put_together((first, full), (second, of_another_chain)), second),
        (put_together((first, full), (second, of_other_nodes)), second),
    ):
        name = next(iter(copied.list_children("snapshots")))
        with pytest.raises(ManifestError, match=key):
            read_chain(copied, name)


def test_a_document_in_anothers_place_is_refused() -> None:
    for kind, elsewhere, read in (
        ("void", commit_key("weekly", 0), lambda store: find_place(store, "weekly", 0)),
        ("void", commit_key("daily", 1), lambda store: find_place(store, "daily", 1)),
        ("lost", lost_key("daily", "op-1"), lambda store: read_lost(store, "daily", "op-1")),
        ("lost", lost_key("weekly", "op-0"), lambda store: read_lost(store, "weekly", "op-0")),
        ("intent", "operations/op-x/intent.json", lambda store: read_intent(store, "op-x")),
        ("outcome", "operations/op-x/outcome.json", read_recorded_commits),
        ("tombstone", tombstone_key("weekly"), lambda store: read_mark(store, tombstone_key("weekly"))),
        ("only-full", tombstone_key("daily"), lambda store: read_mark(store, tombstone_key("daily"))),
        ("full", FLEET_KEY, lambda store: read_identity(store, FLEET)),
        ("fleet", commit_key("daily", 0), lambda store: read_chain(store, "daily")),
        ("intent", "baselines/0000000000000001.json", read_baseline),
    ):
        with pytest.raises(ManifestError, match=f"object {elsewhere}"):
            read(put_together((elsewhere, written(kind)[0])))


def test_a_snapshot_of_another_fleet_is_refused_and_both_fleets_are_named() -> None:
    store = memory()
    own, is_new = ensure_identity(store, FLEET)
    assert is_new
    chain = Chain(FULL)
    with pytest.raises(ForeignSnapshotError) as error:
        check_of_fleet(chain, own)
    assert commit_key("daily", 0) in error.value.message
    assert chain.full.fleet_id in error.value.message
    assert own.fleet_id in error.value.message
    check_of_fleet(chain, replace(own, fleet_id=chain.full.fleet_id))


def test_documents_of_before_they_had_digests_are_read() -> None:
    fleet = {"schema": "cutline/fleet/1", "fleet": "0a1b2c3d", "name": "shop", "format": 1}
    intent = {"schema": "cutline/operation/1", "operation": OPERATION.id, "kind": "create", "snapshot": "weekly",
              "increment": 2, "began_at": OPERATION.began_at, "nodes": ["a"], "slot": None}  # fmt: skip
    outcome = {"schema": "cutline/operation/1", "operation": OPERATION.id, "state": "done", "reason": "",
               "ended_at": OPERATION.began_at}  # fmt: skip
    documents = ((FLEET_KEY, fleet), (INTENT, intent), (OUTCOME, outcome))
    store = put_together(*((key, json.dumps(one, indent=1).encode()) for key, one in documents))
    assert read_identity(store, FLEET).fleet_id == "0a1b2c3d"
    assert read_recorded_commits(store) == {"weekly": {OPERATION.id: 2}}
    store.delete(OUTCOME)
    assert [one.increment for one in pending_operations(store)] == [2]


def test_what_a_check_can_not_read_does_not_hide_the_rest() -> None:
    store = memory()
    outcome_of(store)
    store.create("operations/20261121T000000Z-0000000002/outcome.json", b"{")
    store.create("operations/nothing", b"")
    unread: list[ManifestError] = []
    assert read_recorded_commits(store, unread=unread) == {"weekly": {OPERATION.id: 0}}
    assert [one.details["object"] for one in unread] == ["operations/20261121T000000Z-0000000002/outcome.json"]
    assert pending_operations(store) == []
