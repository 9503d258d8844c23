"""Routes as users write them: `PATTERN=hash(COLUMN)`, `range(COLUMN, …)`, `column(COLUMN)`, `node('ID')` or `all`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from cutline.fleet.tables.names import unquote_identifier
from cutline.storage.errors import UsageError

NAME = r'(?:[A-Za-z_][A-Za-z0-9_$]*|"(?:[^"]|"")+")'
INTEGER = r"[+-]?[0-9]+"
ROUTE = re.compile(
    rf"""(?P<pattern>.+?)=(?P<text>
    (?P<kind>hash|column)\s*\(\s*(?P<column>{NAME})\s*\)
  | (?P<range>range)\s*\(\s*(?P<ranged>{NAME})(?P<bounds>(?:\s*,\s*{INTEGER})+)\s*\)
  | (?P<node>node)\s*\(\s*'(?P<id>[^']+)'\s*\)
  | (?P<all>all))""",
    re.VERBOSE | re.DOTALL,
)
BOUND_MAX = (1 << 63) - 1
FORMS = "hash(COLUMN), range(COLUMN, BOUND, …), column(COLUMN), node('ID') or all"


class RouteKind(StrEnum):
    """By what the rows of a table are divided among the targets."""

    # The hash of a column's value.
    HASH = "hash"
    # The range in which a column's value is.
    RANGE = "range"
    # The target's id, in a column.
    COLUMN = "column"
    # All rows to one target.
    NODE = "node"
    # All rows of the first source to every target.
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Route:
    """Where the rows of the tables that match `pattern` go; `text` is what the user has written after the pattern.

    `bounds` are the lower bounds of the targets' ranges; `node` is a target's id.
    """

    pattern: str
    text: str
    kind: RouteKind
    column: str = ""
    bounds: tuple[int, ...] = ()
    node: str = ""


def parse_route(word: str) -> Route:
    """The route in the value of an option; raise UsageError if it has none of the forms."""
    found = ROUTE.fullmatch(word.strip())
    if found is None:
        raise UsageError(
            f"--route {word!r} can't be read",
            hint=f"write it as 'SCHEMA.TABLE=…' with one of {FORMS}, such as 'public.account=hash(id)'",
        )
    kind = RouteKind(found["kind"] or found["range"] or found["node"] or found["all"])
    column = unquote_identifier(found["column"] or found["ranged"] or "")
    bounds = tuple(int(one) for one in re.findall(INTEGER, found["bounds"] or ""))
    if any(low >= high for low, high in pairwise((-BOUND_MAX - 2, *bounds, BOUND_MAX + 1))):
        raise UsageError(
            f"--route {word!r}: the bounds do not ascend, or are no numbers of 64 bits",
            hint="give the lower bound of each target, in the order of the target's file",
        )
    return Route(found["pattern"], found["text"], kind, column, bounds, found["id"] or "")
