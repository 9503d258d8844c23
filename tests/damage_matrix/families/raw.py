"""Raw damage of single objects: bytes that a disk, a copying tool or a mistake has changed, and objects that are gone.

Every object and document of a chain has a digest in itself or in the document that lists it, so all of this is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.damage_matrix.damaged import Damaged
from tests.damage_matrix.kinds import DAMAGED, PAIRS, POINT, SINGLE, Expected, FleetName, Kind, Refused, found

FAMILY = "raw"
Change = Callable[[bytes], bytes]
FLIPPED = 0x10


def flip(place: float) -> Change:
    """Flip one bit of the byte at `place`, between 0 and 1."""

    def change(body: bytes) -> bytes:
        changed = bytearray(body)
        changed[int(place * (len(body) - 1))] ^= FLIPPED
        return bytes(changed)

    return change


def zeros(body: bytes) -> bytes:
    """Put zeros in the place of the middle third, as a lost page of a disk does."""
    third = len(body) // 3
    return body[:third] + bytes(third) + body[2 * third :]


def halves(body: bytes) -> bytes:
    """Exchange the halves."""
    middle = len(body) // 2
    return body[middle:] + body[:middle]


OF_SIZE: Mapping[str, Change] = {
    "a byte less": lambda body: body[:-1],
    "empty": lambda body: b"",
    "a byte more": lambda body: body + b"\0",
}
OF_CONTENTS: Mapping[str, Change] = {
    "a bit at the start": flip(0.0),
    "a bit in the middle": flip(0.5),
    "zeros in the middle": zeros,
}
# A document has its digest near its end, in itself.
OF_DOCUMENT: Mapping[str, Change] = {
    **OF_SIZE,
    **OF_CONTENTS,
    "a bit near the end": flip(0.98),
    "only the first half": lambda body: body[: len(body) // 2],
    "halves exchanged": halves,
    "twice in itself": lambda body: body + body,
}
MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Spot:
    """An object of a chain: its name in the names of kinds, its key, and its node."""

    name: str
    fleet: FleetName
    key: Callable[[Damaged], str]
    node: str = ""


def _base(node: str, increment: int = 0) -> Callable[[Damaged], str]:
    return lambda store: str(store.entry("base", node, increment)["key"])


def _object(kind: str, node: str, increment: int = 0) -> Callable[[Damaged], str]:
    return lambda store: str(store.entry(kind, node, increment)["key"])


def _segment(node: str, increment: int) -> Callable[[Damaged], str]:
    return lambda store: str(store.segment(node, increment)["key"])


def _list(kind: str, node: str, increment: int = 0) -> Callable[[Damaged], str]:
    return lambda store: str(store.list_of(kind, node, increment)["key"])


def _commit(increment: int) -> Callable[[Damaged], str]:
    return lambda store: commit_of(store, increment)


def commit_of(store: Damaged, increment: int, name: str = "") -> str:
    """Return the key of a commit of the store's chain, or of the snapshot `name`."""
    folder = f"snapshots/{name or store.name}"
    return f"{folder}/increments/{increment:016d}.json" if increment else f"{folder}/snapshot.json"


OBJECTS: tuple[Spot, ...] = (
    Spot("base copy of s1", PAIRS, _base("s1"), "s1"),
    Spot("base copy of s1-b1", PAIRS, _base("s1-b1"), "s1-b1"),
    Spot("base copy of s2 in increment 1", PAIRS, _base("s2", 1), "s2"),
    Spot("base copy of s2-b1 in increment 1", PAIRS, _base("s2-b1", 1), "s2-b1"),
    Spot("base copy of s2", SINGLE, _base("s2"), "s2"),
    Spot("base copy of s1 in increment 1", SINGLE, _base("s1", 1), "s1"),
    Spot("large objects of s2", PAIRS, _object("large_objects", "s2"), "s2"),
    Spot("large objects of s1", SINGLE, _object("large_objects", "s1"), "s1"),
    Spot("DDL of s1", PAIRS, _object("archive", "s1"), "s1"),
    Spot("DDL of s2 in increment 2", PAIRS, _object("archive", "s2", 2), "s2"),
    Spot("DDL of s1 in increment 1", SINGLE, _object("archive", "s1", 1), "s1"),
    Spot("globals of s1", PAIRS, _object("globals", "s1"), "s1"),
    Spot("globals of s2", SINGLE, _object("globals", "s2"), "s2"),
    Spot("segment of s1", PAIRS, _segment("s1", 0), "s1"),
    Spot("segment of s2 in increment 2", PAIRS, _segment("s2", 2), "s2"),
    Spot("segment of s1-b1 in increment 1", PAIRS, _segment("s1-b1", 1), "s1-b1"),
    Spot("segment of s1 in increment 1", SINGLE, _segment("s1", 1), "s1"),
    Spot("segment of s1 in increment 3", SINGLE, _segment("s1", 3), "s1"),
    Spot("list of the base copy of s1", SINGLE, _list("base", "s1"), "s1"),
    Spot("list of the base copy of s2 in increment 1", SINGLE, _list("base", "s2", 1), "s2"),
    Spot("list of the large objects of s2", SINGLE, _list("large_objects", "s2"), "s2"),
    Spot("segment of s2", POINT, _segment("s2", 0), "s2"),
)
COMMITS: tuple[Spot, ...] = tuple(
    Spot(f"commit of {f'increment {number}' if number else 'the full snapshot'}", fleet, _commit(number))
    for fleet, numbers in ((PAIRS, (0, 1, 2)), (SINGLE, (0, 3)), (POINT, (0,)))
    for number in numbers
)
# Documents outside of the snapshot.
OUTCOME = Spot("outcome of increment 2", PAIRS, lambda store: store.operation_key("outcome", 2))
FLEET_FILE = Spot("fleet.json", PAIRS, lambda store: "fleet.json")


def kinds() -> Iterator[Kind]:
    """Yield the kinds of this family."""
    for spot in OBJECTS:
        for name, change in OF_SIZE.items():
            yield _kind(spot, name, change, found("size", node=spot.node, object=DAMAGED))
        for name, change in OF_CONTENTS.items():
            yield _kind(spot, name, change, found("digest", node=spot.node, object=DAMAGED))
        yield _missing(spot, found("missing", node=spot.node, object=DAMAGED))
    for spot in COMMITS:
        for name, change in OF_DOCUMENT.items():
            yield _kind(spot, name, change, found("commit", object=DAMAGED))
        # The outcome of the operation says that it committed the newest increment.
        is_newest = spot.name == "commit of increment 3"
        yield _missing(spot, found("missing" if is_newest else "commit", object=DAMAGED))
    for name, change in OF_DOCUMENT.items():
        yield _kind(OUTCOME, name, change, found("operation", object=DAMAGED))
        yield _kind(FLEET_FILE, name, change, Refused("manifest", 3))
    yield _missing(FLEET_FILE, Refused("identity-lost", 3))


def _kind(spot: Spot, name: str, change: Change, expected: Expected) -> Kind:
    return Kind(
        f"{spot.name}: {name}", FAMILY, spot.fleet, lambda store: store.damage(spot.key(store), change), expected
    )


def _missing(spot: Spot, expected: Expected) -> Kind:
    return Kind(f"{spot.name}: {MISSING}", FAMILY, spot.fleet, lambda store: store.remove(spot.key(store)), expected)
