"""Sealed damage of large objects and of the globals of servers, which have one copy each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from tests.damage_matrix.damaged import Damaged, Document, Row, Rows
from tests.damage_matrix.kinds import CHAINS, DAMAGED, SINGLE, Hidden, Kind, found
from tests.damage_matrix.world import OWNER, READER

LARGE, GLOBALS = "large objects", "globals"
ONE_COPY = "large objects have one copy, and nothing else in the store contains the original"
# The large one has two parts.
SMALL_OID, LARGE_OID = 4711, 4712


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    yield from _large_objects()
    yield from _globals()


def _small(rows: Rows) -> Row:
    return next(row for row in rows if row["oid"] == SMALL_OID)


def _define(change: Callable[[Document], object]) -> Callable[[Rows], object]:
    def edit(rows: Rows) -> None:
        definition = json.loads(_small(rows)["definition"])
        change(definition)
        _small(rows)["definition"] = json.dumps(definition)

    return edit


def _large_objects() -> Iterator[Kind]:
    of_parts: Mapping[str, Callable[[Rows], object]] = {
        "the parts in another order": lambda rows: rows.reverse(),
        "a part is at another offset": lambda rows: rows[-1].update(offset=rows[-1]["offset"] + 1),
        "a part is there twice": lambda rows: rows.append(dict(rows[-1])),
        "the first part of a large object is lost": lambda rows: rows.pop(0),
    }
    unreadable: Mapping[str, Callable[[Rows], object]] = {
        "a definition is no JSON": lambda rows: _small(rows).update(definition="{"),
        "a definition lacks its owner": _define(lambda one: one.pop("owner")),
        "a privilege that does not exist": _define(lambda one: one["grants"][0].__setitem__(2, "DELETE")),
        "an oid out of range": lambda rows: _small(rows).update(oid=0),
        "a large object is there twice": lambda rows: rows.insert(1, dict(_small(rows))),
    }  # fmt: skip
    for fleet in CHAINS:
        for name, edit in of_parts.items():
            yield Kind(name, LARGE, fleet, _editing(edit, LARGE_OID), found("unreadable", node="s1", object=DAMAGED))
        for name, edit in unreadable.items():
            yield Kind(name, LARGE, fleet, _editing(edit), found("unreadable", node="s1", object=DAMAGED))
    hidden: Mapping[str, Callable[[Rows], object]] = {
        "other contents": lambda rows: _small(rows).update(data=b"other"),
        "another owner": _define(lambda one: one.update(owner=OWNER)),
        "another comment": _define(lambda one: one.update(comment="other")),
        "the privileges are lost": _define(lambda one: one.update(grants=None)),
        "another oid": lambda rows: _small(rows).update(oid=SMALL_OID - 1),
    }
    for name, edit in hidden.items():
        yield Kind(name, LARGE, SINGLE, _editing(edit), Hidden(ONE_COPY))
    yield Kind("the last part is lost", LARGE, SINGLE, _editing(lambda rows: rows.pop(), LARGE_OID), Hidden(ONE_COPY))
    found_kinds: Mapping[str, Callable[[Rows], object]] = {
        "an owner that is no role": _define(lambda one: one.update(owner="nobody")),
        "a privilege of nobody": _define(lambda one: one["grants"][0].__setitem__(1, "nobody")),
        # Every increment says how many there are.
        "a large object is lost": lambda rows: rows.remove(_small(rows)),
    }
    for name, edit in found_kinds.items():
        yield Kind(name, LARGE, SINGLE, _editing(edit), found("roles", "rows", "left-out"))

    def take_oid(rows: Rows) -> None:
        for row in rows:
            row["oid"] = SMALL_OID

    yield Kind("an oid is in two objects", LARGE, SINGLE, _editing(take_oid, LARGE_OID), found("duplicate", node="s1"))

    def miscount(store: Damaged) -> None:
        store.edit_large("s1", SMALL_OID, lambda rows: _small(rows).update(data=b"other"))
        store.large("s1", SMALL_OID)["rows"]["0"] += 1
        store.seal()

    yield Kind("another count", LARGE, SINGLE, miscount, found("rows", node="s1", object=DAMAGED))


def _editing(edit: Callable[[Rows], object], oid: int = SMALL_OID) -> Callable[[Damaged], None]:
    def damage(store: Damaged) -> None:
        store.edit_large("s1", oid, edit)
        store.seal()

    return damage


def _role(name: str, change: Callable[[Document], object]) -> Callable[[Document], object]:
    return lambda document: change(next(role for role in document["roles"] if role["name"] == name))


def _globals() -> Iterator[Kind]:
    def editing(edit: Callable[[Document], object]) -> Callable[[Damaged], None]:
        def damage(store: Damaged) -> None:
            store.edit_globals("s1", edit)
            store.seal()

        return damage

    hidden: Mapping[str, Callable[[Document], object]] = {
        "a role is a superuser": _role(READER, lambda role: role.update(superuser=True)),
        "a role may not log in": _role("postgres", lambda role: role.update(login=False)),
        "a membership more": lambda document: document["memberships"].append(
            {"role": OWNER, "member": READER, "grantor": "postgres"}),
        "a setting of a role": lambda document: document["settings"].append(
            {"name": "work_mem", "value": "1GB", "role": READER}),
        "a role more": lambda document: document["roles"].append({"name": "more"}),
    }  # fmt: skip
    for name, edit in hidden.items():
        yield Kind(name, GLOBALS, SINGLE, editing(edit),
                   Hidden("every shard has its own server, and its globals have one copy"))  # fmt: skip
    found_kinds: Mapping[str, Callable[[Document], object]] = {
        "a role that the DDL names is lost": lambda document: document.update(
            roles=[role for role in document["roles"] if role["name"] != OWNER]),
        "a role is there twice": lambda document: document["roles"].append(document["roles"][0]),
        "a membership of nobody": lambda document: document["memberships"].append(
            {"role": "nobody", "member": READER, "grantor": "postgres"}),
    }  # fmt: skip
    for name, edit in found_kinds.items():
        yield Kind(name, GLOBALS, SINGLE, editing(edit), found("roles", "globals", "definition", node="s1"))
    unreadable: Mapping[str, Callable[[Document], object]] = {
        "an unknown field": lambda document: document.update(more=1),
        "a field is lost": lambda document: document.pop("roles"),
        "a newer format": lambda document: document.update(schema="cutline/globals/2"),
    }
    for name, edit in unreadable.items():
        yield Kind(name, GLOBALS, SINGLE, editing(edit), found("unreadable", node="s1", object=DAMAGED))
