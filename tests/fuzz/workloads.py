"""Strategies for what is done to a database: transactions of random statements on both shards, and how they end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.fuzz.names import quoted
from tests.fuzz.script import ONE_PHASE, THEN, Fate, Statement, Transaction
from tests.fuzz.tables import SHARDS, Table

ROWS_MAX = 6
STATEMENTS_MAX = 5
SEEDS = st.integers(0, (1 << 32) - 1)
FATES = (
    *[Fate.COMMIT] * 8, *[Fate.COMMIT_PREPARED] * 4, Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED, Fate.HOLD_COMMIT,
    Fate.HOLD_LONG_COMMIT, Fate.HOLD_ROLL_BACK, Fate.HALF, Fate.NEVER,
)  # fmt: skip
HELD = frozenset({Fate.HOLD_COMMIT, Fate.HOLD_LONG_COMMIT, Fate.HOLD_ROLL_BACK})
KINDS = (
    *["insert"] * 5, *["update"] * 5, *["move"] * 3, *["delete"] * 3, "upsert", "upsert", "merge", "itself", "itself",
    "truncate", "fill", "copy", "nextval", "back", "again",
)  # fmt: skip
NEEDS_NO_KEY = frozenset({"insert", "truncate", "fill", "copy", "nextval"})


@dataclass(slots=True)
class Writer:
    """Draws statements on the tables that there are."""

    draw: st.DrawFn
    tables: Sequence[Table]
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        # What picks values from pools does not need to shrink.
        self.chance = random.Random(self.draw(SEEDS))

    def statement(self, shard: int) -> str:
        """One statement, or several that belong together; the simplest is an INSERT."""
        tables = [table for table in self.tables if shard in table.shards]
        if not tables:
            return "SELECT 1"
        kind, table = self.draw(st.sampled_from(KINDS)), self.draw(st.sampled_from(tables))
        if (table.is_append_only and kind not in NEEDS_NO_KEY) or not table.assigned:
            kind = self.chance.choice(["insert", "insert", "copy", "truncate"])
            kind = "delete" if kind == "copy" and not table.is_append_only else kind
        made: str = getattr(self, kind)(table)
        return made

    def statements(self, shard: int) -> list[Statement]:
        """Some statements, of which a savepoint takes back one now and then."""
        count = self.draw(st.integers(1, STATEMENTS_MAX))
        return [Statement(self.statement(shard), is_undone=self.draw(st.integers(0, 7)) == 7) for _ in range(count)]

    def row(self, table: Table) -> str:
        return ", ".join(self.chance.choice(column.pool) for column in table.assigned)

    def insert(self, table: Table) -> str:
        if not table.assigned:
            return f"INSERT INTO {table.sql} DEFAULT VALUES"
        names = ", ".join(column.sql for column in table.assigned)
        rows = ", ".join(f"({self.row(table)})" for _ in range(self.draw(st.integers(1, ROWS_MAX))))
        # A key that is taken would take the other rows with it.
        ending = " ON CONFLICT DO NOTHING" if table.primary and self.chance.random() < 0.8 else ""
        return f"INSERT INTO {table.sql} ({names}) VALUES {rows}{ending}"

    def some(self, table: Table) -> str:
        """A condition that holds for some rows, wherever they are."""
        limit = self.draw(st.sampled_from([1, 1, 2, 5, 100]))
        rows = f"SELECT tableoid, ctid FROM {table.sql} OFFSET {self.chance.randrange(6)} LIMIT {limit}"
        if limit == 1 and table.key and self.chance.random() < 0.5:
            column = table.column(self.chance.choice(table.key))
            if "DEFAULT" not in column.pool:
                return f"WHERE {column.sql} = {self.chance.choice(column.pool)}"
        return f"WHERE (tableoid, ctid) IN ({rows})"

    def assignments(self, table: Table, names: Sequence[str]) -> str:
        columns = [table.column(name) for name in names]
        return ", ".join(f"{column.sql} = {self.chance.choice(column.pool)}" for column in columns)

    def update(self, table: Table) -> str:
        if not table.others:
            return self.move(table)
        names = [column.name for column in table.others]
        chosen = self.chance.sample(names, self.chance.randint(1, min(len(names), 3)))
        return f"UPDATE {table.sql} SET {self.assignments(table, chosen)} {self.some(table)}"

    def move(self, table: Table) -> str:
        """Update the key, and now and then more."""
        if not table.key:
            return self.update(table) if table.others else self.delete(table)
        chosen = self.chance.sample(table.key, self.chance.randint(1, len(table.key)))
        chosen += [column.name for column in table.others if self.chance.random() < 0.15]
        return f"UPDATE {table.sql} SET {self.assignments(table, chosen)} {self.some(table)}"

    def itself(self, table: Table) -> str:
        """Write a value over by itself: large ones are left out of the WAL."""
        column = self.chance.choice([*table.assigned, *table.others])
        if "ALWAYS" in column.more:
            return self.delete(table)
        return f"UPDATE {table.sql} SET {column.sql} = {column.sql} {self.some(table)}"

    def again(self, table: Table) -> str:
        """The same rows several times in one transaction."""
        return ";\n".join([self.insert(table), self.update(table), self.move(table), self.update(table)])

    def back(self, table: Table) -> str:
        """Delete rows and insert rows with the same keys."""
        return ";\n".join([self.delete(table), self.insert(table), self.insert(table)])

    def delete(self, table: Table) -> str:
        return f"DELETE FROM {table.sql} {self.some(table)}"

    def upsert(self, table: Table) -> str:
        if not table.primary or not table.others:
            return self.insert(table)
        names = [column.name for column in table.others]
        chosen = self.chance.sample(names, self.chance.randint(1, min(len(names), 3)))
        columns = ", ".join(column.sql for column in table.assigned)
        key = ", ".join(quoted(name) for name in table.primary)
        return (
            f"INSERT INTO {table.sql} ({columns}) VALUES ({self.row(table)}) "
            f"ON CONFLICT ({key}) DO UPDATE SET {self.assignments(table, chosen)}"
        )

    def merge(self, table: Table) -> str:
        if not table.key or not table.others or "DEFAULT" in table.column(table.key[0]).pool:
            return self.update(table)
        key = table.column(table.key[0])
        columns = ", ".join(column.sql for column in table.assigned)
        change = f"UPDATE SET {self.assignments(table, [self.chance.choice(table.others).name])}"
        return (
            f"MERGE INTO {table.sql} AS t USING (SELECT {self.chance.choice(key.pool)} AS k) AS s ON t.{key.sql} = s.k "
            f"WHEN MATCHED THEN {self.chance.choice([change, change, 'DELETE'])} "
            f"WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({self.row(table)})"
        )

    def truncate(self, table: Table) -> str:
        """Seldom all there is: mostly what is there stays, or comes back."""
        if self.chance.random() < 0.4:
            return self.insert(table)
        others = [one for one in self.tables if one.shards == table.shards and self.chance.random() < 0.15]
        names = ", ".join(dict.fromkeys([table.sql, *(one.sql for one in others)]))
        ending = self.chance.choice([" CASCADE", " CASCADE", "", " RESTART IDENTITY CASCADE"])
        only = "ONLY " if self.chance.random() < 0.2 and not others and not table.leaves else ""
        then = f";\n{self.insert(table)}" if self.chance.random() < 0.6 else ""
        return f"TRUNCATE {only}{names}{ending}{then}"

    def fill(self, table: Table) -> str:
        """Many rows at once; where there is no key, equal ones."""
        return ";\n".join(self.insert(table) for _ in range(5))

    def copy(self, table: Table) -> str:
        """COPY, which the WAL has as inserts of many rows: what a table holds, into it, after it was emptied or not."""
        between = f"DELETE FROM {table.sql}" if table.key and not table.is_append_only else "SELECT 1"
        columns = ", ".join(column.sql for column in table.assigned if "ALWAYS" not in column.more)
        if not columns:
            return self.insert(table)
        out, back = f"COPY (SELECT {columns} FROM {table.sql}) TO STDOUT", f"COPY {table.sql} ({columns}) FROM STDIN"
        return THEN.join([out, between, back])

    def nextval(self, table: Table) -> str:
        found = [column for column in table.assigned if "IDENTITY" in column.more]
        if not found:
            return self.insert(table)
        of = f"{table.sql.replace(chr(39), chr(39) * 2)}', '{found[0].name.replace(chr(39), chr(39) * 2)}"
        return f"SELECT nextval(pg_get_serial_sequence('{of}')) FROM generate_series(1, {self.chance.randint(1, 40)})"


def transaction(draw: st.DrawFn, tables: Sequence[Table]) -> Transaction:
    """One transaction: on both shards, or on one."""
    writer = Writer(draw, tables)
    fate = draw(st.sampled_from(FATES))
    shards = draw(st.sampled_from([(0,), (1,), SHARDS, SHARDS])) if fate in ONE_PHASE else SHARDS
    parts = []
    for shard in shards:
        # A lock that keeps readers away would keep away the judge too.
        parts.append(
            (shard, tuple(one for one in writer.statements(shard) if not (fate in HELD and "TRUNCATE" in one.sql)))
        )
    return Transaction(fate, tuple(parts), has_savepoints=draw(st.integers(0, 4)) < 4)
