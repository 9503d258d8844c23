"""Random schema changes. The generator notes each of them, whether PostgreSQL accepts it or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tests.fuzz.maker import INTEGER, STORAGES, TEXT, Maker
from tests.fuzz.names import quoted
from tests.fuzz.objects import alter_object
from tests.fuzz.partitions import alter_partition
from tests.fuzz.renaming import rename_schema
from tests.fuzz.schemas import make_keyed, make_table, make_trigger
from tests.fuzz.table_changes import (
    alter,
    change_computed,
    change_logged,
    change_table,
    create_from,
    replace_table,
    with_column,
)
from tests.fuzz.tables import Column, Table
from tests.fuzz.values import FAMILIES, NULL, Family

BY_TYPE = {one.type: one for one in FAMILIES}
BIGINT = BY_TYPE["bigint"]
LONGER = replace(BY_TYPE["varchar(40)"], type="varchar(80)")
# The types that a column's type can change to, with and without a rewrite of the table.
OTHER_TYPES = {
    "integer": (BIGINT, TEXT), "varchar(40)": (LONGER, TEXT), "text": (LONGER, TEXT), "smallint": (INTEGER, BIGINT),
}  # fmt: skip
VOLATILE = ("(random() * 1000)::integer", "(clock_timestamp() - now() > '1 hour')::integer + 1")
CLAUSES = (
    "SET DEFAULT ", "DROP DEFAULT", "DROP NOT NULL", "SET STATISTICS 7", "SET STORAGE ", "SET NOT NULL",
    "SET COMPRESSION pglz", "SET (n_distinct = 5)",
)  # fmt: skip
KINDS = (
    *["add_column"] * 4, *["drop_column"] * 3, *["rename_column"] * 2, *["change_type"] * 3, *["change_column"] * 2,
    *["rename_table"] * 2, *["create_table"] * 3, "drop_table", "drop_table", "recreate_table", "change_key",
    "change_key", "change_identity", "change_identity", "alter_partition", "alter_partition", *["alter_object"] * 5,
    "change_and_revert", "change_and_revert", "swap_names", "change_table", "change_table", "change_computed",
    "rename_schema", "create_from", "make_trigger", "change_logged",
)  # fmt: skip


@dataclass(slots=True)
class Alterer:
    """Alters what a Maker has made; the statements are in `maker.statements`."""

    maker: Maker

    def alter(self) -> None:
        """Draw one change; the simplest adds a column."""
        kind = self.maker.draw(st.sampled_from(KINDS))
        getattr(self, kind)()

    def alter_object(self) -> None:
        alter_object(self.maker)

    def draw_table(self, *, keyed: bool = False) -> Table | None:
        found = [table for table in self.maker.tables if not keyed or table.constraint]
        return self.maker.draw(st.sampled_from(found)) if found else None

    def run(self, table: Table, clause: str) -> None:
        alter(self.maker, table, clause)

    def replace_table(self, old: Table, new: Table | None) -> None:
        replace_table(self.maker, old, new)

    def one_of(self, *values: str) -> str:
        return self.maker.draw(st.sampled_from(values))

    def add_column(self) -> None:
        """Add a column with or without a default; a volatile one, an identity and a stored one rewrite the table."""
        if (table := self.draw_table()) is None:
            return
        column = self.maker.column(table.columns)
        if self.maker.one_in(5):
            column = Column(self.maker.name(), INTEGER, ("5", "DEFAULT"), f"DEFAULT {self.one_of(*VOLATILE)}")
        self.run(table, f"ADD COLUMN {column.definition}")
        self.replace_table(table, replace(table, columns=(*table.columns, column)))

    def drop_column(self) -> None:
        if (table := self.draw_table()) is None or not (free := [c for c in table.columns if c.name not in table.key]):
            return
        dropped = self.maker.draw(st.sampled_from(free))
        self.run(table, f"DROP COLUMN {dropped.sql} CASCADE")
        left = replace(
            table, columns=tuple(c for c in table.columns if c != dropped and dropped.sql not in c.generated)
        )
        self.replace_table(table, left)
        if self.maker.one_in(3):
            again = replace(dropped, generated="", more="", is_assigned=True, pool=(*dropped.pool, NULL))
            self.run(table, f"ADD COLUMN {again.definition}")
            self.replace_table(left, replace(left, columns=(*left.columns, again)))

    def rename_column(self) -> None:
        if (table := self.draw_table()) is None or not table.columns:
            return
        old, new = self.maker.draw(st.sampled_from(table.columns)), self.maker.name()
        self.run(table, f"RENAME COLUMN {old.sql} TO {quoted(new)}")
        self.replace_table(table, with_renamed_column(table, old, new))

    def change_type(self) -> None:
        """Change a column's type, with or without a rewrite of the table, also in a key."""
        if (table := self.draw_table()) is None:
            return
        computed = " ".join(column.generated for column in table.columns)
        free = [c for c in table.assigned if c.sql not in computed and "GENERATED" not in c.more and table.leaves == ()]
        if not free:
            return
        old = self.maker.draw(st.sampled_from(free))
        kinds = OTHER_TYPES.get(old.family.type, (TEXT,))
        family: Family = self.maker.draw(st.sampled_from(kinds))
        default = f"ALTER {old.sql} DROP DEFAULT, " if "DEFAULT" in old.more else ""
        self.run(table, f"{default}ALTER {old.sql} TYPE {family.type} USING {old.sql}::{family.type}")
        pool = tuple(v if v in (NULL, "DEFAULT") else f"({v})::{family.type}" for v in old.pool)
        self.replace_table(table, with_column(table, old, replace(old, family=family, pool=pool)))

    def change_column(self) -> None:
        """Alter a column without changing the rows."""
        if (table := self.draw_table()) is None or not table.assigned:
            return
        column = self.maker.draw(st.sampled_from(table.assigned))
        value = column.pool[0] if column.pool[0] != "DEFAULT" else NULL
        clause = self.one_of(*CLAUSES)
        clause += value if clause == "SET DEFAULT " else self.one_of(*STORAGES) if clause == "SET STORAGE " else ""
        self.run(table, f"ALTER {column.sql} {clause}")

    def rename_table(self) -> None:
        if (table := self.draw_table()) is None:
            return
        if self.maker.one_in(3) and not table.leaves:
            other = next(schema for schema in self.maker.schemas if schema != table.schema)
            self.run(table, f"SET SCHEMA {quoted(other)}")
            self.replace_table(table, replace(table, schema=other))
        else:
            name = self.maker.name("log" if table.is_append_only else "")
            self.run(table, f"RENAME TO {quoted(name)}")
            self.replace_table(table, replace(table, name=name))

    def create_table(self) -> None:
        make_table(self.maker)

    def drop_table(self) -> None:
        if len(self.maker.tables) > 1 and (table := self.draw_table()) is not None:
            self.maker.run(f"DROP TABLE {table.sql} CASCADE", table.shards)
            self.replace_table(table, None)

    def recreate_table(self) -> None:
        """Drop a table and create another under its name."""
        if (table := self.draw_table()) is None or table.is_append_only:
            return
        self.maker.run(f"DROP TABLE {table.sql} CASCADE", table.shards)
        self.replace_table(table, None)
        make_keyed(self.maker)
        new = self.maker.tables[-1]
        if set(new.shards) <= set(table.shards):
            if new.schema != table.schema:
                self.run(new, f"SET SCHEMA {quoted(table.schema)}")
            moved = replace(new, schema=table.schema)
            self.run(moved, f"RENAME TO {quoted(table.name)}")
            self.replace_table(new, replace(moved, name=table.name))

    def swap_names(self) -> None:
        """Swap the names of two tables."""
        found = [table for table in self.maker.tables if table.schema == "public" and not table.is_append_only]
        if len(found) < 2 or found[0].shards != found[1].shards:
            return
        one, two, between = found[0], found[1], self.maker.name()
        self.run(one, f"RENAME TO {quoted(between)}")
        self.run(two, f"RENAME TO {quoted(one.name)}")
        self.run(replace(one, name=between), f"RENAME TO {quoted(two.name)}")
        self.replace_table(one, replace(one, name=two.name))
        self.replace_table(two, replace(two, name=one.name))

    def change_key(self) -> None:
        """Reorder the columns of a key, or add one."""
        if (table := self.draw_table(keyed=True)) is None:
            return
        more = [c for c in table.others if NULL not in c.pool and c.family.sorts and c.more.endswith("NOT NULL")]
        names = [*table.key, *([more[0].name] if more and self.maker.one_in(2) else [])]
        names = list(self.maker.draw(st.permutations(names)))
        new = f"CONSTRAINT {quoted(self.maker.name())}"
        listed = ", ".join(quoted(name) for name in names)
        self.run(table, f"DROP {table.constraint} CASCADE, ADD {new} PRIMARY KEY ({listed})")
        self.replace_table(table, replace(table, key=tuple(names), primary=tuple(names), constraint=new))

    def change_identity(self) -> None:
        if (table := self.draw_table(keyed=True)) is None:
            return
        if self.maker.one_in(3):
            index, listed = quoted(self.maker.name()), ", ".join(quoted(name) for name in table.key)
            self.maker.run(f"CREATE UNIQUE INDEX {index} ON {table.sql} ({listed})", table.shards)
            self.run(table, f"REPLICA IDENTITY USING INDEX {index}")
            if self.maker.one_in(3):
                schema = quoted(table.schema)
                self.maker.run(
                    self.one_of(f"DROP INDEX {schema}.{index}", f"ALTER INDEX {schema}.{index} RENAME TO other")
                )
        else:
            self.run(table, f"REPLICA IDENTITY {self.one_of('FULL', 'FULL', 'DEFAULT', 'DEFAULT', 'NOTHING')}")

    def alter_partition(self) -> None:
        alter_partition(self.maker)

    def rename_schema(self) -> None:
        rename_schema(self.maker)

    def make_trigger(self) -> None:
        if self.maker.tables:
            make_trigger(self.maker)

    def change_logged(self) -> None:
        if (table := self.draw_table()) is not None and not table.leaves:
            change_logged(self.maker, table)

    def change_table(self) -> None:
        if (table := self.draw_table()) is not None:
            change_table(self.maker, table)

    def change_computed(self) -> None:
        if (table := self.draw_table()) is not None and not table.leaves:
            change_computed(self.maker, table)

    def create_from(self) -> None:
        if (table := self.draw_table()) is not None and not table.leaves and not table.is_append_only and table.columns:
            create_from(self.maker, table)

    def change_and_revert(self) -> None:
        """Make a change and revert it, so that the catalog looks as before."""
        if (table := self.draw_table()) is None:
            return
        name, other = quoted(self.maker.name()), quoted(self.maker.name())
        kind = self.one_of("column", "name", "type", "identity", "column name")
        if kind == "column":
            self.run(table, f"ADD COLUMN {name} integer DEFAULT 3")
            self.run(table, f"DROP COLUMN {name}")
        elif kind == "name":
            self.run(table, f"RENAME TO {name}")
            self.run(replace(table, name=name[1:-1].replace('""', '"')), f"RENAME TO {quoted(table.name)}")
        elif kind == "type" and table.others:
            column = table.others[0]
            self.run(table, f"ALTER {column.sql} TYPE {column.family.type} USING NULL")
        elif kind == "identity" and table.key and not table.leaves:
            self.run(table, "REPLICA IDENTITY NOTHING")
            self.run(table, "REPLICA IDENTITY FULL")
        elif table.columns:
            column = table.columns[0]
            self.run(table, f"RENAME COLUMN {column.sql} TO {other}")
            self.run(table, f"RENAME COLUMN {other} TO {column.sql}")


def with_renamed_column(table: Table, old: Column, new: str) -> Table:
    """The table with one column renamed, wherever its name is used."""

    def names(found: Sequence[str]) -> tuple[str, ...]:
        return tuple(new if name == old.name else name for name in found)

    columns = tuple(
        replace(column, name=new if column == old else column.name,
                generated=column.generated.replace(old.sql, quoted(new)))
        for column in table.columns
    )  # fmt: skip
    return replace(table, columns=columns, key=names(table.key), primary=names(table.primary),
                   partitioned_by=new if table.partitioned_by == old.name else table.partitioned_by)  # fmt: skip
