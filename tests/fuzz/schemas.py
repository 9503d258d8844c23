"""Strategies for what a database holds before its first snapshot: types, tables of every kind, keys, identities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from tests.fuzz.names import ODD, numbered, quoted
from tests.fuzz.tables import SHARDS, Column, Table
from tests.fuzz.values import (
    EXTENSIONS,
    FAMILIES,
    KEY_FAMILIES,
    NULL,
    Family,
    arrays,
    composites,
    key_pools,
    literal,
    pools,
    ranges,
    wide,
)

# A range has no modifiers.
RANGE_FAMILIES = tuple(one for one in KEY_FAMILIES if "(" not in one.type and " to " not in one.type)
SCHEMAS = ("public", 'Odd "S"')
# Of these two the joined name is the same.
DOTTED = (("public.dot", "ted"), ("public", "dot.ted"))
APPEND_ONLY_WORD = "log"
APPEND_ONLY_PATTERN = f"*.{APPEND_ONLY_WORD}*"
TABLES_MAX = 6
COLUMNS_MAX = 7
KEY_WIDTHS = (1, 1, 1, 2, 2, 3)
KINDS_OF_TYPES = ("enum", "domain", "composite", "range")
STORAGES = ("EXTERNAL", "EXTERNAL", "EXTENDED", "MAIN")
INTEGER = FAMILIES[0]
TEXT = FAMILIES[1]
PARTITIONS = {
    "RANGE": ("FROM (MINVALUE) TO (2)", "FROM (2) TO (4)", "DEFAULT"),
    "LIST": ("IN (0, 1)", "IN (2, 3)", "DEFAULT"),
    "HASH": ("WITH (MODULUS 3, REMAINDER 0)", "WITH (MODULUS 3, REMAINDER 1)", "WITH (MODULUS 3, REMAINDER 2)"),
}
REFERENCES = (
    "ON DELETE CASCADE", "ON DELETE SET NULL ON UPDATE CASCADE", "DEFERRABLE INITIALLY DEFERRED",
)  # fmt: skip


@dataclass(slots=True)
class Maker:
    """Draws one database, or makes more tables in one that is there; `numbers` keeps names apart.

    `words` are what names are made of, `labels` those of enum types, `composed` the composite types.
    """

    draw: st.DrawFn
    words: Sequence[str] = ODD
    numbers: int = 0
    statements: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    labels: dict[str, list[str]] = field(default_factory=dict)
    composed: list[str] = field(default_factory=list)

    def one_in(self, count: int) -> bool:
        """Whether something happens that seldom; not at all in the simplest example."""
        return self.draw(st.integers(0, count - 1)) == count - 1

    def name(self, word: str = "") -> str:
        self.numbers += 1
        return numbered(word or self.draw(st.sampled_from(self.words)), self.numbers)

    def run(self, statement: str, shards: tuple[int, ...] = SHARDS) -> None:
        self.statements.append((shards, statement))

    def family(self) -> Family:
        """A type for a column that is in no key."""
        kind = self.draw(st.integers(0, 9))
        if kind < 2:
            return TEXT
        if kind < 6:
            return self.draw(st.sampled_from(FAMILIES))
        if kind < 8 and self.families:
            return self.draw(st.sampled_from(self.families))
        return arrays(self.draw(st.sampled_from([*FAMILIES, *self.families[:1]])))

    def key_family(self) -> Family:
        own = [one for one in self.families if one.sorts]
        return self.draw(
            st.sampled_from([INTEGER, INTEGER, TEXT, TEXT]) | st.sampled_from([*KEY_FAMILIES, *own])
        )  # fmt: skip

    def make_types(self) -> None:
        """An enum, a domain, a composite type and a range type, or some of them."""
        for kind in self.draw(st.lists(st.sampled_from(KINDS_OF_TYPES), max_size=3, unique=True)):
            schema = quoted(self.draw(st.sampled_from(SCHEMAS)))
            name = f"{schema}.{quoted(self.name())}"
            of = self.draw(st.sampled_from(RANGE_FAMILIES if kind == "range" else FAMILIES))
            if kind == "enum":
                words = self.draw(st.lists(st.sampled_from(self.words), min_size=2, max_size=4, unique=True))
                labels = [literal(numbered(word, 0)) for word in words]
                self.run(f"CREATE TYPE {name} AS ENUM ({', '.join(labels)})")
                self.labels[name] = labels
                self.families.append(Family(name, tuple(f"{label}::{name}" for label in labels)))
            elif kind == "domain":
                self.run(f"CREATE DOMAIN {name} AS {of.type} CHECK (num_nulls(VALUE) < 2)")
                self.families.append(replace(of, type=name, edges=tuple(f"{value}::{name}" for value in of.edges)))
            elif kind == "composite":
                parts = [of, self.draw(st.sampled_from(FAMILIES)), TEXT]
                fields = ", ".join(f"{quoted(self.name())} {part.type}" for part in parts)
                self.run(f"CREATE TYPE {name} AS ({fields})")
                self.composed.append(name)
                self.families.append(composites(name, parts))
            else:
                multi = quoted(self.name())
                self.run(f"CREATE TYPE {name} AS RANGE (subtype = {of.type}, multirange_type_name = {multi})")
                self.families += ranges(name, f"{schema}.{multi}", of)

    def key_column(self) -> Column:
        family = self.key_family()
        return Column(self.name(), family, self.draw(key_pools(family)), "NOT NULL")

    def column(self, before: Sequence[Column] = ()) -> Column:
        """A column that is in no key: of any type, wide, computed from one before, or filled by a sequence."""
        kind = self.draw(st.integers(0, 11))
        plain = [column for column in before if column.is_assigned]
        if kind == 11 and plain:
            of, how = self.draw(st.sampled_from(plain)), self.draw(st.sampled_from(["STORED", "VIRTUAL"]))
            how = how if "." not in of.family.type else "STORED"
            return Column(self.name(), INTEGER, (), how, f"num_nulls({of.sql})", is_assigned=False)
        if kind == 10:
            more = self.draw(st.sampled_from(["GENERATED ALWAYS AS IDENTITY", "GENERATED BY DEFAULT AS IDENTITY",
                "DEFAULT 7 NOT NULL", "DEFAULT 8"]))  # fmt: skip
            return Column(self.name(), INTEGER, ("DEFAULT", "5") if "ALWAYS" not in more else ("DEFAULT",), more)
        if kind >= 8:
            length, storage = self.draw(st.sampled_from([2500, 9000, 60])), self.draw(st.sampled_from(STORAGES))
            pool = (wide("a", length), wide("b", length + 1), literal("short"), NULL, "repeat('c', 20000)")
            return Column(self.name(), TEXT, pool, f"STORAGE {storage}")
        family = self.family()
        pool = self.draw(pools(family, nulls=True))
        default = f"DEFAULT {self.draw(st.sampled_from(pool))}" if self.one_in(6) else ""
        return Column(self.name(), family, (*pool, "DEFAULT") if default else pool, default)

    def columns(
        self, key_width: int, of_partition: str = "", *, may_compute: bool = True
    ) -> tuple[list[Column], list[Column]]:
        """The columns of a table in any order, and the key in any order; an identity must not have computed ones."""
        key = [self.key_column() for _ in range(key_width)]
        if of_partition:
            key = [*key[1:], Column(of_partition, INTEGER, tuple(map(str, range(6))), "NOT NULL")]
        others: list[Column] = []
        for _ in range(self.draw(st.integers(0 if key else 1, COLUMNS_MAX))):
            others.append(self.column(others if may_compute else ()))
        return list(self.draw(st.permutations([*key, *others]))), list(self.draw(st.permutations(key)))

    def place(self) -> tuple[str, str]:
        """Where a table goes, and its name."""
        if self.one_in(8):
            taken = {(table.schema, table.name) for table in self.tables}
            free = [one for one in DOTTED if one not in taken]
            if free:
                return free[0]
        return self.draw(st.sampled_from(SCHEMAS)), self.name()

    def shards(self) -> tuple[int, ...]:
        return (self.draw(st.sampled_from(SHARDS)),) if self.one_in(6) else SHARDS

    def make_table(self) -> None:
        kind = self.draw(st.integers(0, 9))
        if kind < 6:
            self.make_keyed()
        elif kind == 6:
            self.make_partitioned()
        elif kind == 7:
            self.make_append_only()
        elif kind == 8 and self.tables:
            self.make_heir(self.draw(st.sampled_from(self.tables)))
        else:
            self.make_full()

    def make_keyed(self) -> None:
        """With a primary key, or by a unique index, or with both and FULL."""
        (schema, name), shards = self.place(), self.shards()
        kind = self.draw(st.sampled_from(["default", "default", "default", "index", "full", "deferrable", "including"]))
        is_full = kind in ("full", "deferrable")
        columns, key = self.columns(self.draw(st.sampled_from(KEY_WIDTHS)), may_compute=not is_full)
        names = tuple(column.name for column in key)
        listed = ", ".join(column.sql for column in key)
        constraint = f"CONSTRAINT {quoted(self.name())}"
        references = self.references(columns, shards)
        definitions = [*(column.definition for column in columns), *references]
        included = [column.sql for column in columns if column not in key and not column.generated]
        if kind == "deferrable":
            definitions.append(f"{constraint} PRIMARY KEY ({listed}) DEFERRABLE INITIALLY DEFERRED")
        elif kind == "including" and included:
            definitions.append(f"{constraint} PRIMARY KEY ({listed}) INCLUDE ({included[0]})")
        elif kind != "index":
            definitions.append(f"{constraint} PRIMARY KEY ({listed})")
        primary = () if kind in ("index", "deferrable") else names
        table = Table(schema, name, tuple(columns), names, primary, constraint if primary else "", shards=shards)
        self.create(table, definitions)
        if is_full:
            self.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL", shards)
        elif kind == "index":
            index = self.name()
            self.run(f"CREATE UNIQUE INDEX {quoted(index)} ON {table.sql} ({listed})", shards)
            self.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX {quoted(index)}", shards)
        self.tables.append(table)

    def references(self, columns: list[Column], shards: tuple[int, ...]) -> list[str]:
        """Now and then another column, which refers to a table that is there; it is added to `columns`."""
        found = [table for table in self.tables if len(table.primary) == 1 and set(shards) <= set(table.shards)]
        if not found or not self.one_in(2):
            return []
        other = self.draw(st.sampled_from(found))
        (key,) = (other.column(name) for name in other.primary)
        column = Column(self.name(), key.family, (*key.pool, NULL))
        columns.append(column)
        how = self.draw(st.sampled_from(REFERENCES))
        return [f"FOREIGN KEY ({column.sql}) REFERENCES {other.sql} ({key.sql}) {how}"]

    def make_full(self) -> None:
        """Without a key: rows may be equal, and there may be no column at all."""
        (schema, name), shards = self.place(), self.shards()
        columns, _ = ([], []) if self.one_in(6) else self.columns(0, may_compute=False)
        table = Table(schema, name, tuple(columns), shards=shards)
        self.create(table, [column.definition for column in columns])
        self.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL", shards)
        self.tables.append(table)

    def make_append_only(self) -> None:
        columns, _ = self.columns(0)
        table = Table("public", self.name(APPEND_ONLY_WORD), tuple(columns), is_append_only=True)
        self.create(table, [column.definition for column in columns])
        self.tables.append(table)

    def make_heir(self, parent: Table) -> None:
        """A table that inherits, with the same key and a column of its own."""
        if parent.leaves or parent.is_append_only or any("IDENTITY" in column.more for column in parent.columns):
            return
        more = self.column()
        table = replace(parent, name=self.name(), columns=(*parent.columns, more))
        key, constraint = ", ".join(quoted(name) for name in parent.key), f"CONSTRAINT {quoted(self.name())}"
        definitions = [more.definition, *([f"{constraint} PRIMARY KEY ({key})"] if key else [])]
        self.run(f"CREATE TABLE {table.sql} ({', '.join(definitions)}) INHERITS ({parent.sql})", parent.shards)
        if not key:
            self.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL", parent.shards)
        self.tables.append(replace(table, primary=table.key, constraint=constraint if key else ""))

    def make_partitioned(self) -> None:
        (schema, name), shards = self.place(), self.shards()
        how, keyed = self.draw(st.sampled_from(sorted(PARTITIONS))), not self.one_in(4)
        by = self.name()
        columns, key = self.columns(self.draw(st.sampled_from(KEY_WIDTHS)), by, may_compute=keyed)
        names = tuple(column.name for column in key)
        bounds = [found if found == "DEFAULT" else f"FOR VALUES {found}" for found in PARTITIONS[how]]
        leaves = tuple((self.name(), found) for found in bounds)
        names = names if keyed else ()
        table = Table(schema, name, tuple(columns), names, names, leaves=leaves, shards=shards)
        definitions = [column.definition for column in columns]
        if keyed:
            definitions.append(f"PRIMARY KEY ({', '.join(column.sql for column in key)})")
        self.run(f"CREATE TABLE {table.sql} ({', '.join(definitions)}) PARTITION BY {how} ({quoted(by)})", shards)
        for leaf, found in leaves:
            self.make_leaf(table, leaf, found, is_keyed=keyed)
        self.tables.append(table)

    def make_leaf(self, table: Table, leaf: str, bounds: str, *, is_keyed: bool) -> None:
        """A partition made as such, or made apart with its columns in another order, and attached."""
        name = f"{quoted(table.schema)}.{quoted(leaf)}"
        if self.one_in(3) and not any("GENERATED" in column.definition for column in table.columns):
            columns = self.draw(st.permutations([column.definition for column in table.columns]))
            self.run(f"CREATE TABLE {name} (gone integer, {', '.join(columns)})", table.shards)
            self.run(f"ALTER TABLE {name} DROP COLUMN gone", table.shards)
            self.run(f"ALTER TABLE {table.sql} ATTACH PARTITION {name} {bounds}", table.shards)
        else:
            self.run(f"CREATE TABLE {name} PARTITION OF {table.sql} {bounds}", table.shards)
        if not is_keyed or (self.one_in(4) and not any(column.generated for column in table.columns)):
            self.run(f"ALTER TABLE {name} REPLICA IDENTITY FULL", table.shards)

    def make_trigger(self) -> None:
        """One that keeps what became of a table's rows, in a table that statements write to as well."""
        of = self.draw(st.sampled_from(self.tables))
        name, function = self.name(), f"public.{quoted(self.name())}"
        seen = Column("id", INTEGER, ("DEFAULT",), "GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY")
        texts = (Column("op", TEXT, ("'x'", NULL)), Column("what", TEXT, ("'y'", NULL)))
        table = Table("public", name, (seen, *texts), ("id",), ("id",), shards=of.shards)
        self.create(table, [column.definition for column in table.columns])
        body = f"BEGIN INSERT INTO {table.sql} (op, what) VALUES (TG_OP, NEW::text); RETURN NULL; END"
        self.run(f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS {literal(body)}", of.shards)
        when = "AFTER INSERT OR UPDATE OR DELETE"
        self.run(
            f"CREATE TRIGGER {quoted(self.name())} {when} ON {of.sql} FOR EACH ROW EXECUTE FUNCTION {function}()",
            of.shards,
        )
        self.tables.append(table)

    def create(self, table: Table, definitions: Sequence[str]) -> None:
        self.run(f"CREATE TABLE {table.sql} ({', '.join(definitions)})", table.shards)


def make_schema(maker: Maker) -> None:
    """Make a database before its first snapshot."""
    for extension in EXTENSIONS:
        maker.run(f"CREATE EXTENSION {extension} SCHEMA public")
    for schema in (SCHEMAS[1], DOTTED[0][0]):
        maker.run(f"CREATE SCHEMA {quoted(schema)}")
    maker.make_types()
    maker.make_keyed()
    for _ in range(maker.draw(st.integers(1, TABLES_MAX - 1))):
        maker.make_table()
    if maker.one_in(4):
        maker.make_trigger()
