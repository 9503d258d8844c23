"""Parse table routes, resolve them against definitions and targets, and compute the target of each row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, runs
from cutline.columns.fields import field_of, find_nulls, read_integers, read_texts, read_uuids
from cutline.columns.hashing import hash_integers, hash_values
from cutline.fleet.messages import list_some
from cutline.fleet.table_names import is_matching, unquote_identifier
from cutline.nodes.groups import Column, Group
from cutline.storage.errors import RefusedError, UsageError

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
    """How the rows in a table are divided among the targets."""

    # By the hash of a column's value.
    HASH = "hash"
    # By ranges of a column's value.
    RANGE = "range"
    # By a column that contains the target's id.
    COLUMN = "column"
    # All rows go to one target.
    NODE = "node"
    # All rows from the first source go to every target.
    ALL = "all"


class Route(Struct, frozen=True):
    """Where the rows in the tables that match `pattern` go; `text` is the user's text after the pattern.

    `bounds` are the lower bounds of the targets' ranges; `node` is a target's id.
    """

    pattern: str
    text: str
    kind: RouteKind
    column: str = ""
    bounds: tuple[int, ...] = ()
    node: str = ""


def parse_route(word: str) -> Route:
    """Parse the value of a --route option; raise UsageError if it has none of the FORMS."""
    match = ROUTE.fullmatch(word.strip())
    if match is None:
        raise UsageError(
            f"--route {word!r} can't be parsed",
            hint=f"write it as 'SCHEMA.TABLE=…' with one of {FORMS}, such as 'public.account=hash(id)'",
        )
    kind = RouteKind(match["kind"] or match["range"] or match["node"] or match["all"])
    column = unquote_identifier(match["column"] or match["ranged"] or "")
    bounds = tuple(int(bound) for bound in re.findall(INTEGER, match["bounds"] or ""))
    if any(low >= high for low, high in pairwise((-BOUND_MAX - 2, *bounds, BOUND_MAX + 1))):
        raise UsageError(
            f"--route {word!r}: the bounds are not ascending, or exceed 64 bits",
            hint="give the lower bound of each target, in the order of the target's file",
        )
    return Route(match["pattern"], match["text"], kind, column, bounds, match["id"] or "")


NAMED_MAX = 20
INTEGERS = ("smallint", "integer", "bigint")
TEXTS = ("text", "character varying")
UUID = "uuid"


class TableRoute(Struct, frozen=True):
    """The route of one table's rows.

    `number` is the table's number in the restore. `field` is the index of the route's column in a stored line. A line
    has `width` fields, and the first `key_width` fields are the key. `type` is the column's type. For a route to a
    single node, `target` is that target's number.
    """

    table: str
    number: int
    kind: RouteKind
    text: str
    key_width: int
    width: int
    column: str = ""
    field: int = 0
    type: str = ""
    bounds: tuple[int, ...] = ()
    target: int = 0

    @property
    def divides_like(self) -> tuple[object, ...]:
        """A value that is equal for two tables if equal values in their route columns lead to the same target."""
        of_type = next((some for some in (INTEGERS, TEXTS) if self.type in some), self.type)
        return self.kind, self.bounds, self.target, of_type

    def share(self, target: int, count: int, *, is_first: bool) -> float:
        """Return the fraction of a source's rows that target number `target` of `count` gets, assuming equal parts."""
        if self.kind is RouteKind.ALL:
            return float(is_first)
        return float(self.target == target) if self.kind is RouteKind.NODE else 1 / count


class SourceRoutes(Struct, frozen=True):
    """A source's table routes, keyed by its group numbers.

    For a table with route `all`, only the first source's rows count.

    `targets` are the target ids, in order of their numbers. `others` are further ids of targets, which rows may have.
    `refused` are the groups whose tables a target does not have because it refused them, keyed by the target's number.
    """

    source: str
    is_first: bool
    targets: tuple[str, ...]
    by_group: Mapping[int, TableRoute]
    others: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def select(self, numbers: Iterable[int]) -> SourceRoutes:
        """Return these routes, limited to the groups with these `numbers`."""
        chosen = {number: self.by_group[number] for number in numbers if number in self.by_group}
        return replace(self, by_group=chosen)


def resolve_routes(groups: Sequence[Group], routes: Sequence[Route], targets: tuple[str, ...]) -> dict[str, TableRoute]:
    """Return every table's route, keyed by table name: the first route whose pattern matches.

    With a single target, no routes are needed.

    Raises UsageError if some tables have no route, naming all of them, or if a route does not fit its table or matches
    no table.
    """
    resolved: dict[str, TableRoute] = {}
    for number, group in enumerate(groups):
        route = next((route for route in routes if is_matching(group.name, [route.pattern])), None)
        if route is not None:
            resolved[group.name] = _resolve(group, number, route, targets)
        elif len(targets) == 1:
            resolved[group.name] = _to_one(group, number, targets, f"node('{targets[0]}')", 0)
    if lacking := [group.name for group in groups if group.name not in resolved]:
        raise UsageError(
            f"the rows of these tables have no route to {', '.join(targets)}: {list_some(lacking, NAMED_MAX)}",
            hint=[
                f"give each a --route 'SCHEMA.TABLE=…' with {FORMS}; patterns such as 'public.*=hash(id)' are allowed",
                "to restore each shard to its own target instead, omit --route; the targets need the shards' ids",
            ],
            details={"tables": lacking, "targets": list(targets)},
        )
    for route in routes:
        if not any(is_matching(group.name, [route.pattern]) for group in groups):
            raise UsageError(
                f"--route {route.pattern}={route.text}: no restored table matches {route.pattern}",
                hint="see: snapshot show NAME",
            )
    return resolved


def _to_one(group: Group, number: int, targets: tuple[str, ...], text: str, target: int) -> TableRoute:
    assert target < len(targets)
    return TableRoute(group.name, number, RouteKind.NODE, text, group.key_width, len(group.columns), target=target)


def _resolve(group: Group, number: int, route: Route, targets: tuple[str, ...]) -> TableRoute:
    what = f"--route {group.name}={route.text}"
    if route.kind is RouteKind.ALL:
        return TableRoute(group.name, number, route.kind, route.text, group.key_width, len(group.columns))
    if route.kind is RouteKind.NODE:
        if route.node not in targets:
            raise UsageError(f"{what}: the target has no node {route.node}", hint=f"its nodes are {', '.join(targets)}")
        return _to_one(group, number, targets, route.text, targets.index(route.node))
    names = [column.name for column in group.columns]
    if route.column not in names:
        raise UsageError(
            f"{what}: table {group.name} has no stored column {route.column}",
            hint=f"its columns are {', '.join(names) or 'none'}",
        )
    field = names.index(route.column)
    type_ = _check_type(what, group.columns[field], route.kind)
    if route.kind is RouteKind.RANGE and len(route.bounds) != len(targets):
        raise UsageError(
            f"{what}: it has {len(route.bounds)} bounds for {len(targets)} targets: {', '.join(targets)}",
            hint="give the lower bound of each target, in the order of the target's file",
        )
    return TableRoute(
        group.name,
        number,
        route.kind,
        route.text,
        group.key_width,
        len(group.columns),
        route.column,
        field,
        type_,
        route.bounds,
    )


def _check_type(what: str, column: Column, kind: RouteKind) -> str:
    """Return the column's type without its modifier; raise UsageError if rows can't be divided by it."""
    type_ = column.type.partition("(")[0]
    allowed = {
        RouteKind.HASH: (*INTEGERS, *TEXTS, UUID),
        RouteKind.RANGE: INTEGERS,
        RouteKind.COLUMN: TEXTS,
    }[kind]
    if type_ not in allowed:
        raise UsageError(
            f"{what}: column {column.name} has type {column.type}",
            hint=f"{kind} takes {', '.join(allowed)}, and no domain over these",
        )
    return type_


# Special target numbers for all targets and for no target.
EVERYWHERE, NOWHERE = -1, -2
VALUE_SHOWN_MAX = 80

Places = npt.NDArray[np.int64]


class RowWithoutTargetError(RefusedError):
    """A table's route does not assign a target to a row's value."""


def place_rows(batch: pa.RecordBatch, routes: SourceRoutes) -> Places:
    """Return the target number for each row of the batch; rows of groups without a route go NOWHERE.

    The batch has the columns group, key and row. Adjacent rows of a group are placed together. Raises
    RowWithoutTargetError naming the first value without a target.
    """
    group = np.asarray(batch.column("group").to_numpy())
    places = np.full(len(batch), NOWHERE, np.int64)
    for rows in runs(group):
        route = routes.by_group.get(int(group[rows.start]))
        if route is None or (route.kind is RouteKind.ALL and not routes.is_first):
            continue
        if route.kind is RouteKind.ALL:
            places[rows] = EVERYWHERE
        elif route.kind is RouteKind.NODE:
            places[rows] = route.target
        else:
            places[rows] = _places_of(batch.slice(rows.start, rows.stop - rows.start), route, routes)
    return places


def _places_of(batch: pa.RecordBatch, route: TableRoute, routes: SourceRoutes) -> Places:
    if route.field < route.key_width:
        fields = field_of(column_of(batch.column("key")), route.key_width, route.field)
    else:
        fields = field_of(column_of(batch.column("row")), route.width, route.field)
    nulls = find_nulls(fields)
    if nulls.any():
        raise _without_target(fields, nulls, route, routes, "a NULL value can't be routed")
    if route.kind is RouteKind.HASH:
        return _hashes_of(fields, route).astype(np.int64) % len(routes.targets)
    if route.kind is RouteKind.RANGE:
        places = np.searchsorted(np.array(route.bounds, np.int64), read_integers(fields), "right") - 1
        if (below := places < 0).any():
            raise _without_target(fields, below, route, routes, f"the lowest bound is {route.bounds[0]}")
        return places.astype(np.int64)
    named = [*((target, target) for target in routes.targets), *routes.others.items()]
    ids = pa.array([name.encode() for name, _ in named], pa.large_binary())
    numbers = pc.index_in(read_texts(fields).to_large_arrow(), value_set=ids)
    unknown: Flags = numbers.is_null().to_numpy(zero_copy_only=False)
    if unknown.any():
        raise _without_target(fields, unknown, route, routes, f"the targets are {', '.join(routes.targets)}")
    of_names = np.array([routes.targets.index(target) for _, target in named], np.int64)
    return of_names[np.asarray(numbers.to_numpy(), np.int64)]


def _hashes_of(fields: BytesColumn, route: TableRoute) -> Ints:
    """Return the results of PostgreSQL's hash function for the type, without the sign."""
    if route.type in INTEGERS:
        hashes = hash_integers(read_integers(fields))
    else:
        hashes = hash_values(read_uuids(fields) if route.type == UUID else read_texts(fields))
    return (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64)


def _without_target(
    fields: BytesColumn, wrong: Flags, route: TableRoute, routes: SourceRoutes, why: str
) -> RowWithoutTargetError:
    first = int(np.flatnonzero(wrong)[0])
    value = fields.part(slice(first, first + 1)).data.tobytes().decode(errors="backslashreplace")[:VALUE_SHOWN_MAX]
    return RowWithoutTargetError(
        f"table {route.table} of {routes.source} has rows with {route.column} = {value}, which {route.text} assigns to"
        f" no target: {why}",
        hint="give the table a route that covers all its rows, or correct the rows and take another increment",
        details={"table": route.table, "column": route.column, "value": value, "source": routes.source},
    )
