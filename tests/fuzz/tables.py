"""What the generator knows of a database that it has made: tables, their columns, and the values that those take.

Nothing here says what rows a table has. A statement may fail, and the generator never learns of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.names import quoted
from tests.fuzz.values import Family

SHARDS = (0, 1)


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its pool. `generated` and `default` are expressions; `more` is what else CREATE TABLE says of it."""

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

    `key` names what rows are told apart by, `primary` what may be referred to, `constraint` the primary key. `leaves`
    are names and bounds, `partitioned_by` is a column; one that was detached keeps the statement that would attach it
    again. `shards` have the table. One that is append-only has no identity: it takes no UPDATE and no DELETE.
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
        """Those of them that are not in the key."""
        return tuple(column for column in self.assigned if column.name not in self.key)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)
