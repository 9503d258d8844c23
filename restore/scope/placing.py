"""Place rows: the number of the target that each row goes to, by whole columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, runs
from cutline.columns.fields import field_of, find_nulls, read_integers, read_texts, read_uuids
from cutline.columns.hashing import hash_integers, hash_values
from cutline.restore.scope.table_routes import INTEGERS, UUID, RouteKind, SourceRoutes, TableRoute
from cutline.storage.errors import RefusedError

# In the place of a target's number: to all of them, and to none.
EVERYWHERE, NOWHERE = -1, -2
VALUE_SHOWN_MAX = 80

Places = npt.NDArray[np.int64]


class RowWithoutTargetError(RefusedError):
    """A row's value leads to no target."""


def place_rows(batch: pa.RecordBatch, routes: SourceRoutes) -> Places:
    """The number of each row's target (columns group, key, row); rows of other groups go NOWHERE.

    Rows of a group that are adjacent are placed together. Raises RowWithoutTargetError naming the first value without.
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
        raise _without_target(fields, nulls, route, routes, "NULL is no value to divide rows by")
    if route.kind is RouteKind.HASH:
        return _hashes_of(fields, route).astype(np.int64) % len(routes.targets)
    if route.kind is RouteKind.RANGE:
        places = np.searchsorted(np.array(route.bounds, np.int64), read_integers(fields), "right") - 1
        if (below := places < 0).any():
            raise _without_target(fields, below, route, routes, f"the lowest bound is {route.bounds[0]}")
        return places.astype(np.int64)
    ids = pa.array([target.encode() for target in routes.targets], pa.large_binary())
    numbers = pc.index_in(read_texts(fields).to_large_arrow(), value_set=ids)
    unknown: Flags = numbers.is_null().to_numpy(zero_copy_only=False)
    if unknown.any():
        raise _without_target(fields, unknown, route, routes, f"the targets are {', '.join(routes.targets)}")
    return np.asarray(numbers.to_numpy(), np.int64)


def _hashes_of(fields: BytesColumn, route: TableRoute) -> Ints:
    """What PostgreSQL's function for the type returns, without its sign."""
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
        f"table {route.table} of {routes.source} has rows with {route.column} = {value}, and {route.text} gives these"
        f" no target: {why}",
        hint="give the table a route that all of its rows have, or correct the rows and take another increment",
        details={"table": route.table, "column": route.column, "value": value, "source": routes.source},
    )
