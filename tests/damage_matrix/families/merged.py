"""Raw damage of a chain that begins with a merge: its documents, what it carries and has written, and what lies before.

A check reads such a chain from its newest merge on. What only earlier restore points need is checked with
`--increment N`, as long as they have not been given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cutline.snapshots.records.merge_records import begin_key, merge_key
from tests.damage_matrix.damaged import Damaged, Document
from tests.damage_matrix.families.raw import MISSING, OF_CONTENTS, OF_DOCUMENT, OF_SIZE, Change, commit_of
from tests.damage_matrix.kinds import DAMAGED, MERGED, Expected, Hidden, Kind, found

FAMILY, DOCUMENTS, EARLIER = "merged: objects", "merged: documents", "merged: what lies before"
# The family `raw` has all changes.
SIZE, CONTENTS = "a byte less", "a bit in the middle"
OF_DOCUMENTS = (SIZE, CONTENTS, "only the first half", "twice in itself")
ONLY_EARLIER = "only restore points before the newest merge need it; `check --increment N` with one of them finds it"

NOT_NEEDED = "the chain is read from the merge before it, whose objects stay until a mark says that it begins later"
MARK_ALONE = "nothing else says that the restore points before the merge were given up"


@dataclass(frozen=True, slots=True)
class Spot:
    """An object of the merged chain: its name in the names of kinds, its entry, and its node."""

    name: str
    entry: Callable[[Damaged], Document]
    node: str


def _only(entries: list[Document]) -> Document:
    (entry,) = entries
    return entry


def _carried(node: str, increment: int = 2) -> Callable[[Damaged], Document]:
    """The object of the full snapshot that the merge carries."""
    return lambda store: _only(
        [
            one
            for one in store.merged_bases(node, increment)
            if "dead" in one and store.commits[0]["operation"] in one["key"]
        ]
    )


def _dead(node: str, increment: int = 2) -> Callable[[Damaged], Document]:
    def entry(store: Damaged) -> Document:
        found: Document = _carried(node, increment)(store)["dead"]
        return found

    return entry


def _written(node: str) -> Callable[[Damaged], Document]:
    return lambda store: _only(store.merged_bases(node, 2, store.merge(2)["operation"]))


# What the newest state needs.
NEEDED: tuple[Spot, ...] = (
    Spot("a carried object of s1", _carried("s1"), "s1"),
    Spot("a carried object of s2-b1", _carried("s2-b1"), "s2-b1"),
    Spot("the dead rows of an object of s1", _dead("s1"), "s1"),
    Spot("the dead rows of an object of s1-b1", _dead("s1-b1"), "s1-b1"),
    Spot("the rows that a merge has written for s1", _written("s1"), "s1"),
    Spot("the rows that a merge has written for s2-b1", _written("s2-b1"), "s2-b1"),
    Spot("a table of s2 that increment 1 has copied", lambda store: store.entry("base", "s2", 1), "s2"),
    Spot("the last segment of s1 in a merge", lambda store: store.merge(2)["archived"]["s1"][-1], "s1"),
    Spot("the last segment of s2-b1 in a merge", lambda store: store.merge(2)["archived"]["s2-b1"][-1], "s2-b1"),
    Spot("the segment of s1 after a merge", lambda store: store.segment("s1", 3), "s1"),
    Spot("the list of the merged base of s1", lambda store: _list(store, "s1"), "s1"),
    Spot("the large objects of s2", lambda store: store.entry("large_objects", "s2"), "s2"),
    Spot("the DDL of s1 at a merge", lambda store: store.entry("archive", "s1", 2), "s1"),
    Spot("the globals of s1", lambda store: store.entry("globals", "s1"), "s1"),
)
# What only the restore point at the earlier merge needs.
ONLY_OF_FIRST: tuple[Spot, ...] = (
    Spot("the dead rows of an object of s1 in an earlier merge", _dead("s1", 1), "s1"),
    Spot("the last segment of s1 in an earlier merge", lambda store: store.merge(1)["archived"]["s1"][-1], "s1"),
)


def _list(store: Damaged, node: str) -> Document:
    return _only([one for one in store.merge(2)["lists"] if one["node"] == node])


COMMITS = {"the commit of the full snapshot": 0, "the commit at an earlier merge": 1, "the commit at the merge": 2,
           "the commit after the merge": 3}  # fmt: skip


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    for spot in NEEDED:
        yield from _of_object(FAMILY, spot)
    for name, number in COMMITS.items():
        yield from _of_document(
            name,
            lambda store, number=number: commit_of(store, number),
            found("commit", object=DAMAGED),
            # The outcome of its operation says that it was committed.
            found("missing" if number == max(COMMITS.values()) else "commit", object=DAMAGED),
        )
    for name, number, missing in (
        ("the newest merge", 2, Hidden(NOT_NEEDED, is_same=True)),
        ("the merge at which the chain begins", 1, found("commit", object=DAMAGED)),
    ):
        yield from _of_document(
            name, lambda store, number=number: merge_key(MERGED, number), found("commit", object=DAMAGED), missing
        )
    yield from _of_document(
        "the mark at which the chain begins",
        lambda store: begin_key(MERGED, 1),
        found("mark", object=DAMAGED),
        Hidden(MARK_ALONE, is_same=True),
    )
    for spot in ONLY_OF_FIRST:
        yield from _of_object(EARLIER, spot, 1)
        yield from _of_object(EARLIER, spot, None, Hidden(ONLY_EARLIER, is_same=True))


def _of_object(family: str, spot: Spot, increment: int | None = None, hidden: Hidden | None = None) -> Iterator[Kind]:
    at = f" at increment {increment}" if increment else ""
    for name, kind, change in ((SIZE, "size", OF_SIZE[SIZE]), (CONTENTS, "digest", OF_CONTENTS[CONTENTS])):

        def damage(store: Damaged, change: Change = change) -> None:
            store.damage(spot.entry(store)["key"], change)

        expected = hidden or found(kind, node=spot.node, object=DAMAGED)
        yield Kind(f"{spot.name}{at}: {name}", family, MERGED, damage, expected, increment)
    yield Kind(
        f"{spot.name}{at}: {MISSING}",
        family,
        MERGED,
        lambda store: store.remove(spot.entry(store)["key"]),
        hidden or found("missing", node=spot.node, object=DAMAGED),
        increment,
    )


def _of_document(name: str, key: Callable[[Damaged], str], damaged: Expected, missing: Expected) -> Iterator[Kind]:
    for change in OF_DOCUMENTS:

        def damage(store: Damaged, change: Change = OF_DOCUMENT[change]) -> None:
            store.damage(key(store), change)

        yield Kind(f"{name}: {change}", DOCUMENTS, MERGED, damage, damaged)
    yield Kind(f"{name}: {MISSING}", DOCUMENTS, MERGED, lambda store: store.remove(key(store)), missing)
