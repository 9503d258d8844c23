"""Collect what keeps a restore from the tables of one database: the tables that it concerns, and what to type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import database_name
from cutline.restore.obstacles.obstacles import Obstacles
from cutline.storage.errors import RefusedError

NAMED_MAX = 10


class TablesUnfitError(RefusedError):
    """The tables of a database can't take the rows of a snapshot, or our role may not load them."""


class Checker:
    """Adds obstacles for one database; `label` names it."""

    def __init__(self, node: Node, obstacles: Obstacles) -> None:
        self.node, self.database, self._obstacles = node, database_name(node.dsn), obstacles
        self.label = f"database {self.database}"

    def add(self, what: str, hint: str, statements: Iterable[str] = ()) -> None:
        """Add an obstacle, with what to do about it; the `statements` do it."""
        lines = [f"  {statement};" for statement in dict.fromkeys(statements)]
        if lines:
            hint = f"{hint} in {self.label} of {self.node.id}:"
        error = TablesUnfitError(
            f"node {self.node.id}: {what}", hint=[hint, *lines], details={"database": self.database}
        )
        self._obstacles.add(error, self.node.id)


def named(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"
