"""Every kind of JSON document in a store: its reader detects any fault and names the object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.snapshots.records.documents import ManifestError, seal
from cutline.storage.memory import InMemoryStore
from tests.unit.document_kinds import (
    DEFAULTED,
    KINDS,
    MAPS,
    OPTIONAL,
    VALID_VALUES,
    seal_by_hand,
    write_document,
)
from tests.unit.made_commits import memory


def test_a_document_has_no_spaces_and_ends_with_its_digest() -> None:
    values = [1, -2.5, None, True, [], {}, {'\u2028\U0001f600/"': "\x7f"}]
    content = {"schema": "cutline/odd/1", "a": values, "é\n": ""}
    assert seal(content | {"digest": "of before"}) == seal_by_hand(content)


def store_with(kind: str, body: bytes) -> InMemoryStore:
    """A store that has `body` in place of the document, and the other documents intact."""
    write, key, _ = KINDS[kind]
    store = memory()
    write(store)
    store.delete(key)
    store.create(key, body)
    return store


def check_refusal(kind: str, body: bytes) -> ManifestError:
    """Check that the reader refuses `body`, naming the object and what to do; return the error."""
    _, key, read = KINDS[kind]
    with pytest.raises(ManifestError) as error:
        read(store_with(kind, body))
    assert f"object {key}" in error.value.message, error.value.message
    assert error.value.details["object"] == key
    assert error.value.hint
    assert error.value.exit_code == 3
    return error.value


@pytest.mark.parametrize("kind", KINDS)
def test_an_intact_document_is_read(kind: str) -> None:
    body, _ = write_document(kind)
    assert KINDS[kind][2](store_with(kind, body))
    assert seal(json.loads(body)) == body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [
    b"", b"\x00", b"PAR1", b"\xff\xfe", b'{"schema": "\xc3', b"{}", b"[]", b"7", b"null", b'"text"', b"NaN", b"{",
    b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' * 700 + b"1" + b"}" * 700, b'{"a": ' + b"9" * 10_000 + b"}",
    b'{"schema": NaN}', b'{"schema": 1e999}', b'{"digest": [1]}', b'{"digest": null}', '{"ä": "ü"}'.encode(),
    '{"ä": "ü"}'.encode("utf-16"), b'{"schema": "\\ud800"}',
], ids=lambda body: repr(body[:12]))  # fmt: skip
def test_a_body_that_is_no_such_document_is_refused(kind: str, bad: bytes) -> None:
    check_refusal(kind, bad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_document_is_refused(kind: str) -> None:
    body, _ = write_document(kind)
    for length in {0, 1, len(body) // 2, len(body) - 70, len(body) - 2, len(body) - 1}:
        check_refusal(kind, body[:length])
    for more in (b"\n", b" ", b"}", body):
        check_refusal(kind, body + more)


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_changed_byte_is_detected(kind: str, data: st.DataObject) -> None:
    body, _ = write_document(kind)
    place = data.draw(st.integers(0, len(body) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda one: one != body[place]))
    check_refusal(kind, body[:place] + bytes([byte]) + body[place + 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_a_duplicate_field_is_detected(kind: str) -> None:
    body, _ = write_document(kind)
    first = body[1 : body.index(b",") + 1]
    check_refusal(kind, body.replace(b"{", b"{" + first, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_must_match_the_document(kind: str) -> None:
    body, _ = write_document(kind)
    document = json.loads(body)
    for digest in ("0" * 64, "", None, 7, [document["digest"]]):
        check_refusal(kind, json.dumps(document | {"digest": digest}, indent=1).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_format_is_refused_with_a_hint_at_a_newer_version(kind: str) -> None:
    body, _ = write_document(kind)
    document = json.loads(body)
    name = document["schema"].rpartition("/")[0]
    for schema in (f"{name}/3", f"{name}/999999999", f"{name}/", "else", "", 1, None, [name]):
        assert "newer version" in check_refusal(kind, seal(document | {"schema": schema})).hint
    # A newer version may also seal its documents in another form.
    newer = json.dumps(document | {"schema": f"{name}/3"}).encode()
    assert f"a newer version of Cutline may have written it: its format is {name}/3" in check_refusal(kind, newer).hint


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*path, name)
        yield from paths_in(one, (*path, name))


def alter(document: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> bytes:
    """Alter the value at a path and seal the document; `change` gets the object that holds it, and its name."""
    copy = json.loads(json.dumps(document))
    holder = copy
    for name in path[:-1]:
        holder = holder[name]
    change(holder, path[-1])
    return seal_by_hand(copy)


def paths_without_digest(document: Any) -> list[tuple[Any, ...]]:
    """All paths but that of the digest, which sealing replaces."""
    return [path for path in paths_in(document) if path != ("digest",)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_a_wrong_type_is_refused_at_every_path(kind: str) -> None:
    body, _ = write_document(kind)
    document = json.loads(body)
    for path in paths_without_digest(document):
        for wrong in ({"x": []}, [[]], True, 1.5, 10**30, float("nan"), "\ud800"):

            def put(holder: Any, name: Any, wrong: Any = wrong) -> None:
                wrong = wrong if not isinstance(wrong, dict) or not isinstance(holder[name], dict) else []
                holder[name] = wrong

            if (path[-1], wrong) not in VALID_VALUES:
                check_refusal(kind, alter(document, path, put))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_field_is_refused(kind: str) -> None:
    body, _ = write_document(kind)
    document = json.loads(body)
    absent = OPTIONAL.get(kind, set()) | DEFAULTED
    for path in paths_without_digest(document):
        if isinstance(path[-1], str) and path[-1] not in absent:
            check_refusal(kind, alter(document, path, lambda holder, name: holder.pop(name)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_refused_at_every_path(kind: str) -> None:
    """An unknown field may change the meaning of the others."""
    body, _ = write_document(kind)
    document = json.loads(body)

    def add(holder: Any, name: Any) -> None:
        holder[name]["novel"] = 7

    whole = check_refusal(kind, seal(document | {"novel": 7}))
    assert "unknown field `novel`" in whole.message
    assert "newer version" in whole.hint
    for path in paths_without_digest(document):
        if isinstance(value_at(document, path), dict) and path[-1] not in MAPS:
            message = check_refusal(kind, alter(document, path, add)).message
            assert f"unknown field `novel` - at `{as_text(path)}`" in message


def value_at(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def as_text(path: tuple[Any, ...]) -> str:
    """The path as an error shows it, without the keys of maps."""
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
    # The rest of the message is the Python version's.
    ("full", {"created_at": "2026-02-30T00:00:00Z"}, "- at `$.created_at`"),
    ("outcome", {"state": "over"}, "Invalid enum value 'over' - at `$.state`"),
    ("lease", {"expires_at": "2026-11-20T01:00:00"}, "- at `$.expires_at`"),
])  # fmt: skip
def test_an_error_names_the_path_of_the_fault(kind: str, change: dict[str, Any], message: str) -> None:
    body, _ = write_document(kind)
    assert message in check_refusal(kind, seal(json.loads(body) | change)).message
