"""Changed values: every value of a JSON document, removed, of another type, empty, negative, huge, swapped, doubled.

And every key of a map: its value belongs to another node or table then, or to none.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Place = tuple[str | int, ...]
# A key that stands twice in an object. JSON text can have that; a dict can't, so the second one is marked.
TWICE = "\ue000twice:"
HUGE_INTEGER, HUGE_TEXT = 2**63 - 1, "x" * 1_000_000
# Lists within each other. Python's own encoder could not write them.
DEEP, DEEP_LISTS = "\ue000deep", 2_000


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one value: the document's key, the value's path in it, and the way in which it is changed."""

    key: str
    path: Place
    way: str

    def __str__(self) -> str:
        return f"{self.key} {path_text(self.path)} {self.way}"


class _Removed:
    """Stands for no value."""


REMOVED = _Removed()
Others = Mapping[str, list[Any]]
# The keys of maps in the documents of the worlds: ids of nodes, and numbers.
ID, IDS, UNKNOWN = re.compile(r"s\d(-b\d)?|\d+"), ("s1", "s1-b1", "s2", "s2-b1"), {True: "77", False: "s9"}
TO_KNOWN, TO_UNKNOWN = "under a known key", "under an unknown key"


def path_text(path: Place) -> str:
    """The path as messages name it: `cut.nodes[0].position`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def field_of(path: Place) -> str:
    """What the value is a value of: its own name, or that of the list that holds it."""
    names = [str(part) for part in path if not isinstance(part, int)]
    return names[-1] if names else ""


def paths_in(value: Any, path: Place = ()) -> Iterator[Place]:
    """The paths of all values in a document, itself excluded."""
    children: Iterator[tuple[str | int, Any]]
    children = (
        iter(value.items())
        if isinstance(value, dict)
        else iter(enumerate(value))
        if isinstance(value, list)
        else iter(())
    )
    for name, child in children:
        if path or name != "digest":
            yield (*path, name)
            yield from paths_in(child, (*path, name))


def collect_others(documents: Mapping[str, Any]) -> Others:
    """All values of each field in all documents, for swaps."""
    found: dict[str, list[Any]] = {}
    for document in documents.values():
        for path in paths_in(document):
            values = found.setdefault(field_of(path), [])
            value = value_at(document, path)
            if value not in values:
                values.append(value)
    return found


def value_at(document: Any, path: Place) -> Any:
    """The value at a path."""
    for part in path:
        document = document[part]
    return document


def mutations_of(key: str, document: Any) -> Iterator[Mutation]:
    """Every mutation of the document that is not the same as another."""
    for path in paths_in(document):
        value = value_at(document, path)
        for way, applies in WAYS.items():
            if applies(value):
                yield Mutation(key, path, way)
        if ID.fullmatch(str(path[-1])) and isinstance(path[-1], str):
            yield from (Mutation(key, path, way) for way in (TO_KNOWN, TO_UNKNOWN))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_collection(value: Any) -> bool:
    return isinstance(value, dict | list)


WAYS: Mapping[str, Callable[[Any], bool]] = {
    "removed": lambda value: True,
    "other type": lambda value: True,
    "null": lambda value: value is not None,
    "empty": lambda value: value not in ("", 0, [], {}, None) and not isinstance(value, bool),
    "negative": _is_number,
    "huge": lambda value: _is_number(value) or isinstance(value, str),
    "beyond": _is_number,
    "NaN": _is_number,
    "other": lambda value: True,
    "deep": _is_collection,
    "twice": lambda value: True,
}


def mutate(documents: Mapping[str, Any], mutation: Mutation, others: Others, seed: int) -> Any | None:
    """The document with its value changed; None if there is no other value to take."""
    document = copy.deepcopy(documents[mutation.key])
    *parents, name = mutation.path
    parent = value_at(document, tuple(parents))
    value = parent[name]
    if mutation.way in (TO_KNOWN, TO_UNKNOWN):
        other = _other_id(str(name), parent) if mutation.way == TO_KNOWN else UNKNOWN[str(name).isdigit()]
        if other is None or other in parent:
            return None
        parent[other] = parent.pop(name)
        return document
    if mutation.way == "twice":
        _double(parent, name, _another(mutation.path, value, others, seed))
        return document
    changed = _changed(mutation, value, others, seed)
    if changed is REMOVED:
        del parent[name]
    elif changed == value and type(changed) is type(value):
        return None
    else:
        parent[name] = changed
    return document


def _other_id(name: str, parent: Mapping[str, Any]) -> str | None:
    """The id of another node that the map does not have, or the next number; None if there is none."""
    return str(int(name) + 1) if name.isdigit() else next((one for one in IDS if one not in parent), None)


def _double(parent: Any, name: str | int, other: Any) -> None:
    if isinstance(parent, list) and isinstance(name, int):
        parent.insert(name, copy.deepcopy(parent[name]))
        return
    parent[f"{TWICE}{name}"] = copy.deepcopy(other)


def _another(path: Place, value: Any, others: Others, seed: int) -> Any:
    candidates = [one for one in others.get(field_of(path), []) if one != value and type(one) is type(value)]
    if candidates:
        return random.Random(f"{seed} {path}").choice(candidates)
    if isinstance(value, bool):
        return not value
    return value + 1 if _is_number(value) else f"{value}x" if isinstance(value, str) else value


def _changed(mutation: Mutation, value: Any, others: Others, seed: int) -> Any:
    way = mutation.way
    if way == "removed":
        return REMOVED
    if way == "other type":
        return 7 if isinstance(value, str | dict | list) or value is None else "7"
    if way == "null":
        return None
    if way == "empty":
        return type(value)()
    if way == "negative":
        return -value if value else -1
    if way == "huge":
        return HUGE_TEXT if isinstance(value, str) else HUGE_INTEGER
    if way == "beyond":
        return 10**400
    if way == "NaN":
        return float("nan")
    if way == "deep":
        return DEEP
    return _another(mutation.path, value, others, seed)


def differences(before: Any, after: Any, path: Place = ()) -> Iterator[Place]:
    """The paths of the smallest values in which two documents differ; a value that only one has counts as different."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for name, value in before.items():
            yield from differences(value, after[name], (*path, name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, value in enumerate(before):
            yield from differences(value, after[number], (*path, number))
    elif type(before) is not type(after) or before != after:
        yield path


def text_of(document: Any) -> str:
    """The document as JSON text, with the keys that stand twice."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace(f'"{TWICE}', '"')
    return text.replace(f'"{DEEP}"', "[" * DEEP_LISTS + "]" * DEEP_LISTS)
