"""The scope of a restore: what it restores of a snapshot.

The records of restored databases have it, so that another process goes on with the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutline.fleet.record import Record
from cutline.fleet.tables.names import table_name


class TableMove(Record, frozen=True):
    """A table and the name under which it is restored."""

    schema: str
    table: str
    to_schema: str
    to_table: str

    @property
    def label(self) -> str:
        """Both names, as options and reports have them."""
        return f"{table_name(self.schema, self.table)}={table_name(self.to_schema, self.to_table)}"


class RestoreScope(Record, frozen=True, kw_only=True):
    """What is restored of a snapshot; without values all of it, as it was.

    `nodes`: these shards alone. `schemas`: the rows of the tables in these schemas.
    `schema_only`: the DDL without rows and without values of sequences. `data_only`: the rows and the values of
    sequences, into tables that exist. `no_owner`: all objects belong to the role that restores. `role_map`: pairs of a
    role and the one that takes its place. `moves`: the rows of these tables, which get other names. `analyze`: the
    planner's statistics are collected, too. `no_database_settings`: what belongs to the database itself is left out.
    """

    nodes: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    schema_only: bool = False
    data_only: bool = False
    no_owner: bool = False
    role_map: tuple[tuple[str, str], ...] = ()
    moves: tuple[TableMove, ...] = ()
    analyze: bool = False
    no_database_settings: bool = False

    @property
    def changes_roles(self) -> bool:
        """Whether other roles than the snapshot's own or are granted what is restored."""
        return self.no_owner or bool(self.role_map)

    def roles_needed(self, roles: Iterable[str]) -> list[str]:
        """The roles that a target must have, if the snapshot names `roles`."""
        names = dict(self.role_map)
        kept = [] if self.no_owner else [names.get(one, one) for one in roles]
        return list(dict.fromkeys([*kept, *names.values()]))


WHOLE = RestoreScope()
