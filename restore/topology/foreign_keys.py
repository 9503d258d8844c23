"""Which foreign keys hold on every target, when their tables' rows are divided among several."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cutline.fleet.tables.names import table_name
from cutline.restore.routing.routes import RouteKind
from cutline.restore.routing.table_routes import TableRoute
from cutline.restore.topology.topology import Topology

IDENTIFIER = r'"(?:[^"]|"")+"'
RELATION = rf"{IDENTIFIER}\.{IDENTIFIER}"
COLUMNS = rf"{IDENTIFIER}(?:, {IDENTIFIER})*"
# As pg_dump writes it, with every identifier quoted. What has another form (PERIOD) is left out.
DEFINITION = re.compile(
    rf"ALTER TABLE (?:ONLY )?(?P<table>{RELATION})\s+ADD CONSTRAINT {IDENTIFIER} FOREIGN KEY \((?P<columns>{COLUMNS})\)"
    rf" REFERENCES (?P<other>{RELATION})\((?P<others>{COLUMNS})\).*",
    re.DOTALL,
)


def keeps_foreign_key(topology: Topology, statement: str) -> bool:
    """Whether the routes lead every row to a target that has the row that it refers to.

    They do if there is one target, or if the table referred to is on every target; or if both tables are divided in the
    same way by columns that the key equates, or are on the same target.
    """
    if len(topology.targets) == 1:
        return True
    parts = DEFINITION.fullmatch(statement)
    if parts is None:
        return False
    own, other = _route(topology.routes, parts["table"]), _route(topology.routes, parts["other"])
    if own is None or other is None:
        return False
    if other.kind is RouteKind.ALL:
        return True
    if own.divides_like != other.divides_like:
        return False
    if own.kind is RouteKind.NODE:
        return True
    pairs = zip(_names(parts["columns"]), _names(parts["others"]), strict=True)
    return (own.column, other.column) in pairs


def _route(routes: Mapping[str, TableRoute], relation: str) -> TableRoute | None:
    """The route of a table by its quoted name; a partitioned table has none."""
    return routes.get(table_name(*_names(relation)))


def _names(text: str) -> list[str]:
    """The names in a list of quoted identifiers."""
    return [one[1:-1].replace('""', '"') for one in re.findall(IDENTIFIER, text)]
