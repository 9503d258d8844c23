"""Collect what several checks refuse, and raise it as one error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError

COMMENT = "-- "


class ObstaclesError(RefusedError):
    """Several things of different kinds keep a restore from its targets."""


class TargetLacksError(RefusedError):
    """A target's server lacks a requirement of the snapshot's databases."""


@dataclass(slots=True)
class Obstacles:
    """The obstacles found so far; `warnings` are states that an operator should know and that may be meant."""

    found: list[SnapshotError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, error: SnapshotError, node: str | None = None) -> None:
        """Add an obstacle, and the node that it is on unless it says so itself."""
        if node is not None:
            error.details.setdefault("node", node)
        self.found.append(error)

    @contextmanager
    def collecting(self, node: str | None = None) -> Iterator[None]:
        """Add an error of the block, if it is a refusal, and continue."""
        try:
            yield
        except (RefusedError, UnreachableError) as error:
            self.add(error, node)

    def raise_found(self) -> None:
        """Raise the obstacle, or one error with all of them, if there are any.

        A single one is raised as it is. Several of the same kind are an error of that kind, others an ObstaclesError;
        its `details["obstacles"]` has node, kind, message and hint of each. Those that say the same are one in the
        message, with their nodes.
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
    """Group the errors with the same message and hint, which differ only in their nodes."""
    alike: dict[tuple[str, str], list[SnapshotError]] = {}
    for error in errors:
        alike.setdefault((error.message, error.hint), []).append(error)
    return list(alike.values())


def _with_nodes(alike: list[SnapshotError]) -> str:
    """Their common message, with their nodes if there are several."""
    nodes = [str(error.details["node"]) for error in alike if error.details.get("node")]
    return f"{alike[0].message} (on nodes {', '.join(nodes)})" if len(nodes) > 1 else alike[0].message


def _hints_of(errors: Iterable[SnapshotError]) -> list[str]:
    """The distinct hints, each with the numbers of its obstacles; lines to be typed have no number before them."""
    numbers: dict[str, list[int]] = {}
    for number, alike in enumerate(_alike(errors), 1):
        numbers.setdefault(alike[0].hint, []).append(number)
    if len(numbers) == 1:
        return next(iter(numbers)).split("\n")
    lines: list[str] = []
    for hint, which in numbers.items():
        if hint.startswith(COMMENT):
            # A script says itself where it is to be run, and stays one.
            lines += hint.split("\n")
            continue
        label = f"for {', '.join(map(str, which))}:"
        lines += [f"{label} {hint}"] if "\n" not in hint else [label, *hint.split("\n")]
    return lines
