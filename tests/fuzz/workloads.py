"""Strategies for what is done to a database: transactions of random statements on both shards, and how they end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.fuzz.maker import Maker
from tests.fuzz.names import quoted
from tests.fuzz.script import ONE_PHASE, THEN, Fate, Statement, Transaction
from tests.fuzz.tables import SHARDS, Table

ROWS_MAX = 6
STATEMENTS_MAX = 5
SEEDS = st.integers(0, (1 << 32) - 1)
FATES = (
    *[Fate.COMMIT] * 8, *[Fate.COMMIT_PREPARED] * 4, Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED, Fate.HOLD_COMMIT,
    Fate.HOLD_LONG_COMMIT, Fate.HOLD_ROLL_BACK, Fate.HALF, Fate.NEVER, Fate.OPEN_COMMIT, Fate.OPEN_ROLL_BACK,
)  # fmt: skip
# What is done while a create runs must not be waited for by it.
FATES_MEANWHILE = (
    *[Fate.COMMIT] * 6, *[Fate.COMMIT_PREPARED] * 4, Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED, Fate.HOLD_COMMIT,
    Fate.HALF,
)  # fmt: skip
HELD = frozenset({Fate.HOLD_COMMIT, Fate.HOLD_LONG_COMMIT, Fate.HOLD_ROLL_BACK, Fate.OPEN_COMMIT, Fate.OPEN_ROLL_BACK})
KINDS = (
    *["insert"] * 6, *["update"] * 6, *["move"] * 4, *["delete"] * 3, *["upsert"] * 2, *["merge"] * 2, *["itself"] * 3,
    "truncate", "fill", "copy", "nextval", "back", "again", "nested", "nested", "block", "moved_over", "turned", "many",
    "message", "temporary", "locked", "sequence",
)  # fmt: skip
NEEDS_NO_KEY = frozenset({"insert", "truncate", "fill", "copy", "nextval", "many", "message", "temporary", "sequence"})
ENDS = ("RELEASE", "ROLLBACK TO")
NUMBERS = frozenset({"integer", "bigint", "smallint"})


@dataclass(slots=True)
class Writer:
    """Draws statements on the tables that there are."""

    draw: st.DrawFn
    tables: Sequence[Table]
    sequences: Sequence[str] = ()
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
        keys = " UNION ".join(f"SELECT {self.chance.choice(key.pool)} AS k" for _ in range(self.chance.randint(1, 3)))
        missing = self.chance.choice(["", "", f" WHEN NOT MATCHED BY SOURCE THEN {change}"])
        return (
            f"MERGE INTO {table.sql} AS t USING ({keys}) AS s ON t.{key.sql} = s.k "
            f"WHEN MATCHED THEN {self.chance.choice([change, change, 'DELETE'])} "
            f"WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({self.row(table)}){missing}"
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

    def nested(self, table: Table) -> str:
        """Savepoints within savepoints, some of them undone; a statement that fails undoes all."""
        first, second = self.chance.choice(ENDS), self.chance.choice(ENDS)
        return ";\n".join([
            self.insert(table), "SAVEPOINT two", self.update(table), "SAVEPOINT three", self.move(table),
            self.insert(table), f"{first} three", self.delete(table), f"{second} two", self.insert(table),
        ])  # fmt: skip

    def block(self, table: Table) -> str:
        """A block of which an exception undoes a part, as often as it is gone through."""
        return (
            f"DO $fuzz$ BEGIN FOR i IN 1..{self.chance.randint(1, 4)} LOOP\n{self.update(table)};\n"
            f"BEGIN\n{self.insert(table)};\n{self.delete(table)};\n"
            f"IF i <> 2 THEN RAISE EXCEPTION 'undone'; END IF;\nEXCEPTION WHEN OTHERS THEN NULL; END;\n"
            "END LOOP; END $fuzz$"
        )

    def moved_over(self, table: Table) -> str:
        """Rows deleted and inserted by one command, with other values in a column."""
        columns = [column for column in table.assigned if "ALWAYS" not in column.more]
        if not columns or (table.is_append_only and not table.key):
            return self.insert(table)
        names = ", ".join(column.sql for column in columns)
        other = self.chance.choice(columns)
        values = ", ".join(
            self.chance.choice(other.pool) if column is other and "DEFAULT" not in other.pool else column.sql
            for column in columns
        )
        gone = f"DELETE FROM {table.sql} {self.some(table)} RETURNING {names}"
        return f"WITH gone AS ({gone}) INSERT INTO {table.sql} ({names}) SELECT {values} FROM gone"

    def turned(self, table: Table) -> str:
        """All rows of a key change it at once."""
        numbers = [name for name in table.key if table.column(name).family.type in NUMBERS]
        if not numbers:
            return self.move(table)
        column = table.column(self.chance.choice(numbers)).sql
        return f"UPDATE {table.sql} SET {column} = {self.chance.choice(['-', '1 -', '1 +'])} {column}"

    def many(self, table: Table) -> str:
        """More rows than a page has: by numbers for their key, or those that there are once more."""
        columns = [column for column in table.assigned if "ALWAYS" not in column.more]
        if not columns:
            return self.insert(table)
        names, numbers = (
            ", ".join(column.sql for column in columns),
            f"generate_series(1, {self.chance.choice([40, 90])})",
        )
        if not table.key:
            return f"INSERT INTO {table.sql} ({names}) SELECT {names} FROM {table.sql} LIMIT 60"
        number = next(
            (column for column in columns if column.name in table.key and column.family.type in NUMBERS), None
        )
        if number is None:
            return self.fill(table)
        values = ", ".join("n" if column is number else self.chance.choice(column.pool) for column in columns)
        if "DEFAULT" in values:
            return self.fill(table)
        return f"INSERT INTO {table.sql} ({names}) SELECT {values} FROM {numbers} AS n ON CONFLICT DO NOTHING"

    def message(self, table: Table) -> str:
        """Somebody else's message in the WAL, or the tag of a transaction."""
        prefix, transactional = self.chance.choice([("others", "true"), ("others", "false"), ("snapshot.gid", "true")])
        return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', 'tag {self.chance.getrandbits(60)}')"

    def temporary(self, table: Table) -> str:
        """A table that is nobody else's; a transaction that has one can't be prepared."""
        return f"CREATE TEMPORARY TABLE gone ON COMMIT DROP AS SELECT * FROM {table.sql}"

    def locked(self, table: Table) -> str:
        """Rows locked and left as they are."""
        return f"SELECT 1 FROM {table.sql} {self.some(table)} {self.chance.choice(['FOR UPDATE', 'FOR KEY SHARE'])}"

    def sequence(self, table: Table) -> str:
        """One that is no column's, used, set, or begun anew."""
        if not self.sequences:
            return self.nextval(table)
        name = self.chance.choice(self.sequences)
        text = "'" + name.replace("'", "''") + "'"
        return self.chance.choice([
            f"SELECT nextval({text}) FROM generate_series(1, {self.chance.randint(1, 9)})",
            f"SELECT nextval({text}) FROM generate_series(1, {self.chance.randint(1, 9)})",
            f"SELECT setval({text}, {self.chance.randint(1, 12)}, {self.chance.choice(['true', 'false'])})",
            f"ALTER SEQUENCE {name} RESTART", f"ALTER SEQUENCE {name} INCREMENT {self.chance.randint(1, 5)}",
        ])  # fmt: skip

    def nextval(self, table: Table) -> str:
        found = [column for column in table.assigned if "IDENTITY" in column.more]
        if not found:
            return self.insert(table)
        of = f"{table.sql.replace(chr(39), chr(39) * 2)}', '{found[0].name.replace(chr(39), chr(39) * 2)}"
        return f"SELECT nextval(pg_get_serial_sequence('{of}')) FROM generate_series(1, {self.chance.randint(1, 40)})"


def transaction(draw: st.DrawFn, maker: Maker, at: str = "") -> Transaction:
    """One transaction: on both shards, or on one; at a point of the create that comes, or before it."""
    writer = Writer(draw, maker.tables, maker.sequences)
    fate = draw(st.sampled_from(FATES_MEANWHILE if at else FATES))
    shards = draw(st.sampled_from([(0,), (1,), SHARDS, SHARDS])) if fate in ONE_PHASE else SHARDS
    parts = []
    for shard in shards:
        # A lock that keeps readers away would keep away the judge too.
        may_lock = not (fate in HELD or (at and fate is Fate.HALF))
        kept = (one for one in writer.statements(shard) if may_lock or not locks(one.sql))
        parts.append((shard, tuple(kept)))
    return Transaction(fate, tuple(parts), draw(st.integers(0, 4)) < 4, at)


def locks(statement: str) -> bool:
    """Whether readers wait for the end of its transaction."""
    return "TRUNCATE" in statement or "ALTER SEQUENCE" in statement
