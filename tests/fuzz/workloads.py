"""Strategies for transactions: random statements on both shards, and how the transactions end."""

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
# A create must not have to wait for a transaction that runs during it.
FATES_MEANWHILE = (
    *[Fate.COMMIT] * 6, *[Fate.COMMIT_PREPARED] * 4, Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED, Fate.HOLD_COMMIT,
    Fate.HALF,
)  # fmt: skip
HELD = frozenset({Fate.HOLD_COMMIT, Fate.HOLD_LONG_COMMIT, Fate.HOLD_ROLL_BACK, Fate.OPEN_COMMIT, Fate.OPEN_ROLL_BACK})
KINDS = (
    *["insert"] * 6, *["update"] * 6, *["move"] * 4, *["delete"] * 3, *["upsert"] * 2, *["merge"] * 2,
    *["assign_itself"] * 3, "truncate", "fill", "copy", "nextval", "reinsert", "change_again", "nest", "nest",
    "run_block", "move_over", "turn_keys", "insert_many", "emit_message", "create_temporary", "lock_rows",
    "use_sequence",
)  # fmt: skip
NEEDS_NO_KEY = frozenset(
    {"insert", "truncate", "fill", "copy", "nextval", "insert_many", "emit_message", "create_temporary", "use_sequence"}
)
ENDS = ("RELEASE", "ROLLBACK TO")
NUMBERS = frozenset({"integer", "bigint", "smallint"})


@dataclass(slots=True)
class Writer:
    """Draws statements on existing tables."""

    draw: st.DrawFn
    tables: Sequence[Table]
    sequences: Sequence[str] = ()
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        # The choice of values from pools does not need to shrink.
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
        statement: str = getattr(self, kind)(table)
        return statement

    def statements(self, shard: int) -> list[Statement]:
        """Some statements, a few of which a savepoint rolls back."""
        count = self.draw(st.integers(1, STATEMENTS_MAX))
        return [Statement(self.statement(shard), is_undone=self.draw(st.integers(0, 7)) == 7) for _ in range(count)]

    def row(self, table: Table) -> str:
        return ", ".join(self.chance.choice(column.pool) for column in table.assigned)

    def insert(self, table: Table) -> str:
        if not table.assigned:
            return f"INSERT INTO {table.sql} DEFAULT VALUES"
        names = ", ".join(column.sql for column in table.assigned)
        rows = ", ".join(f"({self.row(table)})" for _ in range(self.draw(st.integers(1, ROWS_MAX))))
        # A duplicate key would fail the other rows too.
        ending = " ON CONFLICT DO NOTHING" if table.primary and self.chance.random() < 0.8 else ""
        return f"INSERT INTO {table.sql} ({names}) VALUES {rows}{ending}"

    def condition(self, table: Table) -> str:
        """A condition that is true for some rows, whatever partition they are in."""
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
        return f"UPDATE {table.sql} SET {self.assignments(table, chosen)} {self.condition(table)}"

    def move(self, table: Table) -> str:
        """Update the key, and sometimes more."""
        if not table.key:
            return self.update(table) if table.others else self.delete(table)
        chosen = self.chance.sample(table.key, self.chance.randint(1, len(table.key)))
        chosen += [column.name for column in table.others if self.chance.random() < 0.15]
        return f"UPDATE {table.sql} SET {self.assignments(table, chosen)} {self.condition(table)}"

    def assign_itself(self, table: Table) -> str:
        """Overwrite a value by itself: large ones are left out of the WAL."""
        column = self.chance.choice([*table.assigned, *table.others])
        if "ALWAYS" in column.more:
            return self.delete(table)
        return f"UPDATE {table.sql} SET {column.sql} = {column.sql} {self.condition(table)}"

    def change_again(self, table: Table) -> str:
        """Change the same rows several times in one transaction."""
        return ";\n".join([self.insert(table), self.update(table), self.move(table), self.update(table)])

    def reinsert(self, table: Table) -> str:
        """Delete rows and insert rows with the same keys."""
        return ";\n".join([self.delete(table), self.insert(table), self.insert(table)])

    def delete(self, table: Table) -> str:
        return f"DELETE FROM {table.sql} {self.condition(table)}"

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
        """Truncate, but seldom leave the table empty: often insert, instead or afterwards."""
        if self.chance.random() < 0.4:
            return self.insert(table)
        others = [one for one in self.tables if one.shards == table.shards and self.chance.random() < 0.15]
        names = ", ".join(dict.fromkeys([table.sql, *(one.sql for one in others)]))
        ending = self.chance.choice([" CASCADE", " CASCADE", "", " RESTART IDENTITY CASCADE"])
        only = "ONLY " if self.chance.random() < 0.2 and not others and not table.leaves else ""
        then = f";\n{self.insert(table)}" if self.chance.random() < 0.6 else ""
        return f"TRUNCATE {only}{names}{ending}{then}"

    def fill(self, table: Table) -> str:
        """Insert many rows at once; equal ones if there is no key."""
        return ";\n".join(self.insert(table) for _ in range(5))

    def copy(self, table: Table) -> str:
        """COPY a table's rows out and in again, emptied in between or not; WAL has a COPY as inserts of many rows."""
        between = f"DELETE FROM {table.sql}" if table.key and not table.is_append_only else "SELECT 1"
        columns = ", ".join(column.sql for column in table.assigned if "ALWAYS" not in column.more)
        if not columns:
            return self.insert(table)
        out, back = f"COPY (SELECT {columns} FROM {table.sql}) TO STDOUT", f"COPY {table.sql} ({columns}) FROM STDIN"
        return THEN.join([out, between, back])

    def nest(self, table: Table) -> str:
        """Nest savepoints, some of which are rolled back; a statement that fails undoes all."""
        first, second = self.chance.choice(ENDS), self.chance.choice(ENDS)
        return ";\n".join([
            self.insert(table), "SAVEPOINT two", self.update(table), "SAVEPOINT three", self.move(table),
            self.insert(table), f"{first} three", self.delete(table), f"{second} two", self.insert(table),
        ])  # fmt: skip

    def run_block(self, table: Table) -> str:
        """Run a loop in which an exception undoes a part of almost every pass."""
        return (
            f"DO $fuzz$ BEGIN FOR i IN 1..{self.chance.randint(1, 4)} LOOP\n{self.update(table)};\n"
            f"BEGIN\n{self.insert(table)};\n{self.delete(table)};\n"
            f"IF i <> 2 THEN RAISE EXCEPTION 'undone'; END IF;\nEXCEPTION WHEN OTHERS THEN NULL; END;\n"
            "END LOOP; END $fuzz$"
        )

    def move_over(self, table: Table) -> str:
        """Delete rows and insert them with another value in a column, by one command."""
        columns = [column for column in table.assigned if "ALWAYS" not in column.more]
        if not columns or (table.is_append_only and not table.key):
            return self.insert(table)
        names = ", ".join(column.sql for column in columns)
        other = self.chance.choice(columns)
        values = ", ".join(
            self.chance.choice(other.pool) if column is other and "DEFAULT" not in other.pool else column.sql
            for column in columns
        )
        gone = f"DELETE FROM {table.sql} {self.condition(table)} RETURNING {names}"
        return f"WITH gone AS ({gone}) INSERT INTO {table.sql} ({names}) SELECT {values} FROM gone"

    def turn_keys(self, table: Table) -> str:
        """Change the key of all rows at once."""
        numbers = [name for name in table.key if table.column(name).family.type in NUMBERS]
        if not numbers:
            return self.move(table)
        column = table.column(self.chance.choice(numbers)).sql
        return f"UPDATE {table.sql} SET {column} = {self.chance.choice(['-', '1 -', '1 +'])} {column}"

    def insert_many(self, table: Table) -> str:
        """Insert more rows than fit on a page: with numbers as keys, or the existing rows again."""
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

    def emit_message(self, table: Table) -> str:
        """Write another program's message to the WAL, or the tag of a transaction."""
        prefix, transactional = self.chance.choice([("others", "true"), ("others", "false"), ("snapshot.gid", "true")])
        return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', 'tag {self.chance.getrandbits(60)}')"

    def create_temporary(self, table: Table) -> str:
        """Create a temporary table; a transaction that does so can't be prepared."""
        return f"CREATE TEMPORARY TABLE gone ON COMMIT DROP AS SELECT * FROM {table.sql}"

    def lock_rows(self, table: Table) -> str:
        """Lock rows without changing them."""
        return (
            f"SELECT 1 FROM {table.sql} {self.condition(table)} {self.chance.choice(['FOR UPDATE', 'FOR KEY SHARE'])}"
        )

    def use_sequence(self, table: Table) -> str:
        """Use, set, restart or alter a sequence that no column owns."""
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


def draw_transaction(draw: st.DrawFn, maker: Maker, at: str = "") -> Transaction:
    """One transaction: on both shards or on one, at a point of the next create or before it."""
    writer = Writer(draw, maker.tables, maker.sequences)
    fate = draw(st.sampled_from(FATES_MEANWHILE if at else FATES))
    shards = draw(st.sampled_from([(0,), (1,), SHARDS, SHARDS])) if fate in ONE_PHASE else SHARDS
    parts = []
    for shard in shards:
        # A lock that blocks readers would block the judge too.
        may_lock = not (fate in HELD or (at and fate is Fate.HALF))
        kept = (one for one in writer.statements(shard) if may_lock or not blocks_readers(one.sql))
        parts.append((shard, tuple(kept)))
    return Transaction(fate, tuple(parts), draw(st.integers(0, 4)) < 4, at)


def blocks_readers(statement: str) -> bool:
    """Whether readers must wait for the end of the statement's transaction."""
    return "TRUNCATE" in statement or "ALTER SEQUENCE" in statement
