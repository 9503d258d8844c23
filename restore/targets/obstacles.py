"""Collect the refusals of several checks, and raise them as one error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from msgspec import Struct, field

from cutline.fleet.messages import name_nodes
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError

COMMENT = "-- "


class ObstaclesError(RefusedError):
    """Several obstacles of different kinds prevent the restore."""


class TargetLacksError(RefusedError):
    """A target's server lacks something that the snapshot's databases require."""


class Obstacles(Struct):
    """The obstacles found so far; `warnings` are conditions that operators should know about but may have intended."""

    found: list[SnapshotError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, error: SnapshotError, node: str | None = None) -> None:
        """Add an obstacle, and set its node if it names none."""
        if node is not None:
            error.details.setdefault("node", node)
        self.found.append(error)

    @contextmanager
    def collecting(self, node: str | None = None) -> Iterator[None]:
        """If the block raises a refusal, add it and continue."""
        try:
            yield
        except (RefusedError, UnreachableError) as error:
            self.add(error, node)

    def raise_found(self) -> None:
        """Raise the obstacles found, if any, as one error.

        A single obstacle is raised unchanged. Several obstacles of the same kind become one error of that kind;
        obstacles of different kinds become an ObstaclesError. Its `details["obstacles"]` contains the node, error,
        message and hint of each. Identical obstacles appear once in the message, with their nodes.
        """
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise _combine(self.found)


def _combine(errors: list[SnapshotError]) -> SnapshotError:
    kinds = {type(error) for error in errors}
    kind: type[SnapshotError] = kinds.pop() if len(kinds) == 1 else ObstaclesError
    details = errors[0].details | {
        "obstacles": [
            {"node": error.details.get("node"), "error": error.slug, "message": error.message, "hint": error.hint}
            for error in errors
        ]
    }
    messages = [_with_nodes(alike) for alike in _alike(errors)]
    numbered = "; ".join(f"({number}) {message}" for number, message in enumerate(messages, 1))
    error = kind.__new__(kind)
    text = f"{len(messages)} obstacles: {numbered}" if len(messages) > 1 else messages[0]
    SnapshotError.__init__(error, text, hint=_hints_of(errors), details=details)
    return error


def _alike(errors: Iterable[SnapshotError]) -> list[list[SnapshotError]]:
    """Group errors that have the same message and hint and differ only in their nodes."""
    alike: dict[tuple[str, str], list[SnapshotError]] = {}
    for error in errors:
        alike.setdefault((error.message, error.hint), []).append(error)
    return list(alike.values())


def _with_nodes(alike: list[SnapshotError]) -> str:
    nodes = [str(error.details["node"]) for error in alike if error.details.get("node")]
    return f"{alike[0].message} (on {name_nodes(nodes)})" if len(nodes) > 1 else alike[0].message


def _hints_of(errors: Iterable[SnapshotError]) -> list[str]:
    """List the distinct hints, numbered like their obstacles; lines to be typed get no numbers."""
    numbers: dict[str, list[int]] = {}
    for number, alike in enumerate(_alike(errors), 1):
        numbers.setdefault(alike[0].hint, []).append(number)
    if len(numbers) == 1:
        return next(iter(numbers)).split("\n")
    lines: list[str] = []
    for hint, which in numbers.items():
        if hint.startswith(COMMENT):
            # Keep a script intact; it says where to run it.
            lines += hint.split("\n")
            continue
        label = f"for {', '.join(map(str, which))}:"
        lines += [f"{label} {hint}"] if "\n" not in hint else [label, *hint.split("\n")]
    return lines
