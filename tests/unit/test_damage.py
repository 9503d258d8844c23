"""Reading a listed object: it is verified before use, and no oversized object is read whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import StoreUnreachableError
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

BODY = bytes(range(256)) * 4
LISTED = (len(BODY), digest(BODY))


@dataclass(frozen=True, slots=True)
class TruncatingStore(InMemoryStore):
    """A store that truncates the first `times` answers, and records how many bytes each read asked for."""

    times: list[int] = field(default_factory=lambda: [0])
    asked: list[int] = field(default_factory=list)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.asked.append(length)
        body = InMemoryStore.read_range(self, key, start, length)
        if self.times[0]:
            self.times[0] -= 1
            return body[:-1]
        return body


def store_of(body: bytes, times: int = 0) -> TruncatingStore:
    store = TruncatingStore("memory://listed", times=[times])
    store.create("a/b", body)
    return store


def test_a_listed_object_is_returned_whole_or_from_an_offset() -> None:
    store = store_of(BODY)
    assert read_listed(store, "n", "a/b", LISTED) == BODY
    assert read_listed(store, "n", "a/b", (len(BODY), digest(BODY[1000:])), 1000) == BODY[1000:]
    empty = InMemoryStore("memory://empty")
    empty.create("a/b", b"")
    assert read_listed(empty, "n", "a/b", (0, digest(b""))) == b""


@pytest.mark.parametrize(
    ("there", "kind"),
    [(b"", "size"), (BODY[:-1], "size"), (BODY + b"x", "size"), (BODY * 99, "size"), (BODY[::-1], "digest")],
)
def test_another_object_in_its_place_is_damage(there: bytes, kind: str) -> None:
    store = store_of(there)
    for listed, start in ((LISTED, 0), ((len(BODY), digest(BODY[1000:])), 1000)):
        with pytest.raises(ObjectDamagedError, match="object a/b of node n") as error:
            read_listed(store, "n", "a/b", listed, start)
        assert error.value.details == {"object": "a/b", "kind": kind, "node": "n"}
    # However large the object is, it is never held whole.
    assert max(store.asked) == len(BODY) + 1


def test_a_missing_object_is_damage() -> None:
    with pytest.raises(ObjectDamagedError, match="it is not in the store"):
        read_listed(InMemoryStore("memory://gone"), "n", "a/b", LISTED)


def test_a_truncated_answer_is_not_damage() -> None:
    assert read_listed(store_of(BODY, times=1), "n", "a/b", LISTED) == BODY
    with pytest.raises(StoreUnreachableError, match="reading a/b ended after 1023 bytes"):
        read_listed(store_of(BODY, times=2), "n", "a/b", LISTED)
