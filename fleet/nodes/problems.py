"""What a node lacks: settings, and privileges of our role; each with its remedy, all reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import psycopg

from cutline.fleet.nodes.server_messages import shorten_message
from cutline.storage.errors import RefusedError

# What to do if a server refuses what our role may not do; init can't name what only the server knows to be missing.
GRANT = "grant the role what the message asks for: docs/roles.md"
RUN_INIT = f"run: snapshot init   it prints the grants that are missing; if it prints none, {GRANT}"


class NodeUnfitError(RefusedError):
    """A node's settings or our role's privileges do not allow the operation."""


class Place(NamedTuple):
    """Where a statement is run: on a primary, in a database. A standby has its primary's roles and privileges."""

    node: str
    database: str


class Purpose(StrEnum):
    """The commands that a privilege is needed for."""

    EVERYTHING = "init and every create"
    NEW_TABLES = "tables created later, and delete of the last snapshot"
    LARGE_OBJECTS = "create --large-objects"
    TERMINAL = "create --terminal and resume"


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """What a node lacks, and the remedy: an SQL statement if it says at which `place`, else an action."""

    node: str
    problem: str
    remedy: str
    place: Place | None = None
    purpose: Purpose = Purpose.EVERYTHING


def distinct_problems(problems: Iterable[NodeProblem]) -> list[NodeProblem]:
    """The problems without those whose statement another one has already, for more commands."""
    found: dict[tuple[object, ...], NodeProblem] = {}
    for one in sorted(problems, key=lambda problem: list(Purpose).index(problem.purpose)):
        found.setdefault((one.node, one.place, one.remedy, one.problem if one.place is None else ""), one)
    return list(found.values())


def refuse_unfit(problems: Iterable[NodeProblem]) -> None:
    """Raise NodeUnfitError if a problem concerns every command; its message and hint name those that do."""
    problems = distinct_problems(problems)
    if required := [one for one in problems if one.purpose == Purpose.EVERYTHING]:
        raise unfit_error(required, [one for one in problems if one.purpose != Purpose.EVERYTHING])


def unfit_error(required: Sequence[NodeProblem], others: Sequence[NodeProblem] = ()) -> NodeUnfitError:
    """The error that names what is required, with the remedies; `others` are in its details only.

    A hint with statements can be run as it is.
    """
    problems, script = [*required, *others], script_of(required)
    actions = list(dict.fromkeys(one.remedy for one in required if one.place is None))
    return NodeUnfitError(
        "; ".join(_texts_of(required)),
        hint=[*(map(comment, actions) if script else actions), *script],
        details={
            "problems": [{"node": one.node, "problem": one.problem} for one in problems],
            "grants": grants_of(problems),
            "actions": actions_of(problems),
        },
    )


@contextmanager
def raising_unfit(kind: type[RefusedError] = NodeUnfitError, *, hint: str) -> Iterator[None]:
    """Raise an error of this `kind` if a server refuses something in the block because our role lacks a privilege."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        # Its session's (fleet/nodes/connections.py).
        node = next(iter(getattr(error, "__notes__", [])), "")
        raise kind(
            f"{node or 'a server'} refused what the role of the dsn may not do: {shorten_message(error)}", hint=hint
        ) from error


def _texts_of(problems: Iterable[NodeProblem]) -> list[str]:
    """The problems as text, each once, with its nodes."""
    nodes: dict[str, dict[str, None]] = {}
    for one in problems:
        needed = "" if one.purpose == Purpose.EVERYTHING else f" (only {one.purpose} need this)"
        nodes.setdefault(f"{one.problem}{needed}", {})[one.node] = None
    return [f"node{'s' if len(where) > 1 else ''} {', '.join(where)}: {text}" for text, where in nodes.items()]


def grants_of(problems: Iterable[NodeProblem]) -> list[dict[str, str]]:
    """The statements, each with its place and purpose, for `--json`."""
    rows = dict.fromkeys((one.place, one.remedy, one.purpose) for one in distinct_problems(problems) if one.place)
    return [
        {"node": place.node, "database": place.database, "statement": statement, "for": purpose}
        for place, statement, purpose in rows
        if place
    ]


def actions_of(problems: Iterable[NodeProblem]) -> list[dict[str, str]]:
    """The remedies that are no statements, each with its node and purpose, for `--json`."""
    return [
        {"node": one.node, "action": one.remedy, "for": one.purpose}
        for one in distinct_problems(problems)
        if one.place is None
    ]


def optional_lines(problems: Sequence[NodeProblem]) -> list[str]:
    """What our role lacks for some commands only, as lines for people: the actions, then the script."""
    nodes: dict[tuple[str, str], dict[str, None]] = {}
    for one in actions_of(problems):
        nodes.setdefault((one["for"], one["action"]), {})[one["node"]] = None
    lines = [f"for {purpose}, on {', '.join(where)}: {action}" for (purpose, action), where in nodes.items()]
    script = script_of(problems)
    if lines or script:
        lines.insert(0, "the role of the dsn is enough for every create of these tables; other tasks need more")
    return [*lines, "to grant what other tasks need, run:", *script] if script else lines


def script_of(problems: Iterable[NodeProblem]) -> list[str]:
    """The lines of a script for a superuser: the statements by purpose and place, with comments that name these."""
    places: dict[tuple[Purpose, str], dict[Place, None]] = {}
    for one in distinct_problems(problems):
        if one.place:
            places.setdefault((one.purpose, one.remedy), {})[one.place] = None
    statements: dict[tuple[Purpose, tuple[Place, ...]], list[str]] = {}
    for (purpose, statement), found in places.items():
        statements.setdefault((purpose, tuple(found)), []).append(statement)
    lines: list[str] = []
    for purpose in Purpose:
        for (other, found_places), some in statements.items():
            if other == purpose:
                where = "; ".join(f"{node}, database {database}" for node, database in found_places)
                lines += [comment(f"as a superuser on {where}; for {purpose}:"), *some]
    return lines


def comment(text: str) -> str:
    """The text as an SQL comment of one line, whatever names it has."""
    return "-- " + " ".join("".join(c if c.isprintable() else " " for c in text).split())
