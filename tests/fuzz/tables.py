"""What the generator knows of a database that it has created: tables, their columns, and values for these.

It does not know which rows a table has: a statement may fail, and the generator never learns of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.names import quoted
from tests.fuzz.values import Family

SHARDS = (0, 1)


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its pool of values. `generated` is an expression; `more` is the rest of its definition."""

    name: str
    family: Family
    pool: tuple[str, ...]
    more: str = ""
    generated: str = ""
    is_assigned: bool = True

    @property
    def sql(self) -> str:
        return quoted(self.name)

    @property
    def definition(self) -> str:
        generated = f" GENERATED ALWAYS AS ({self.generated}) {self.more}" if self.generated else f" {self.more}"
        return f"{self.sql} {self.family.type}{generated.rstrip()}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table, with its leaves if it is partitioned.

    `key` are the columns that identify a row, `primary` those that may be referred to, `constraint` is the primary
    key's. `leaves` are names and bounds, `partitioned_by` is a column; `detached_from` is the statement that would
    attach a detached partition again. `shards` have the table. An append-only table has no replica identity: it
    allows no UPDATE and no DELETE.
    """

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    primary: tuple[str, ...] = ()
    constraint: str = ""
    leaves: tuple[tuple[str, str], ...] = ()
    partitioned_by: str = ""
    detached_from: str = ""
    is_append_only: bool = False
    shards: tuple[int, ...] = SHARDS

    @property
    def sql(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    @property
    def assigned(self) -> tuple[Column, ...]:
        """The columns that an INSERT names."""
        return tuple(column for column in self.columns if column.is_assigned)

    @property
    def others(self) -> tuple[Column, ...]:
        """The assigned columns outside the key."""
        return tuple(column for column in self.assigned if column.name not in self.key)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)
