"""Tables of every kind, with keys and identities, and a whole database before its first snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz.maker import DOTTED, INTEGER, SCHEMAS, TEXT, Maker
from tests.fuzz.names import quoted
from tests.fuzz.own_types import make_types
from tests.fuzz.tables import Column, Table
from tests.fuzz.values import EXTENSIONS, NULL, literal

APPEND_ONLY_WORD = "log"
APPEND_ONLY_PATTERN = f"*.{APPEND_ONLY_WORD}*"
TABLES_MAX = 6
KEY_WIDTHS = (1, 1, 1, 2, 2, 3)
KEYS = ("default", "default", "default", "index", "full", "deferrable", "including")
PARTITIONS = {
    "RANGE": ("FROM (MINVALUE) TO (2)", "FROM (2) TO (4)", "DEFAULT"),
    "LIST": ("IN (0, 1)", "IN (2, 3)", "DEFAULT"),
    "HASH": ("WITH (MODULUS 3, REMAINDER 0)", "WITH (MODULUS 3, REMAINDER 1)", "WITH (MODULUS 3, REMAINDER 2)"),
}
SEQUENCES = (
    "", "AS smallint INCREMENT -3", "START -5 MINVALUE -9", "CACHE 10", "MAXVALUE 12 CYCLE", "INCREMENT 7 START 9",
)  # fmt: skip
REFERENCES = (
    "ON DELETE CASCADE", "ON DELETE SET NULL ON UPDATE CASCADE", "DEFERRABLE INITIALLY DEFERRED",
)  # fmt: skip


def make_table(maker: Maker) -> None:
    kind = maker.draw(st.integers(0, 9))
    if kind < 6:
        make_keyed(maker)
    elif kind == 6:
        make_partitioned(maker)
    elif kind == 7:
        make_append_only(maker)
    elif kind == 8 and maker.tables:
        make_child(maker, maker.draw(st.sampled_from(maker.tables)))
    else:
        make_full(maker)


def make_keyed(maker: Maker) -> None:
    """Create a table identified by its primary key, by a unique index, or by FULL despite a key."""
    (schema, name), shards = maker.place(), maker.shards()
    kind = maker.draw(st.sampled_from(KEYS))
    is_full = kind in ("full", "deferrable")
    columns, key = maker.columns(maker.draw(st.sampled_from(KEY_WIDTHS)), may_compute=not is_full)
    names = tuple(column.name for column in key)
    listed = ", ".join(column.sql for column in key)
    constraint = f"CONSTRAINT {quoted(maker.name())}"
    foreign = add_reference(maker, columns, shards)
    definitions = [*(column.definition for column in columns), *foreign]
    included = [column.sql for column in columns if column not in key and not column.generated]
    if kind == "deferrable":
        definitions.append(f"{constraint} PRIMARY KEY ({listed}) DEFERRABLE INITIALLY DEFERRED")
    elif kind == "including" and included:
        definitions.append(f"{constraint} PRIMARY KEY ({listed}) INCLUDE ({included[0]})")
    elif kind != "index":
        definitions.append(f"{constraint} PRIMARY KEY ({listed})")
    primary = () if kind in ("index", "deferrable") else names
    table = Table(schema, name, tuple(columns), names, primary, constraint if primary else "", shards=shards)
    # Only the definition of an unlogged table is restored, and no logged table may refer to it.
    create_table(maker, table, definitions, "UNLOGGED " if maker.one_in(20) else "")
    if is_full:
        maker.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL", shards)
    elif kind == "index":
        index = maker.name()
        maker.run(f"CREATE UNIQUE INDEX {quoted(index)} ON {table.sql} ({listed})", shards)
        maker.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY USING INDEX {quoted(index)}", shards)
    maker.tables.append(table)


def add_reference(maker: Maker, columns: list[Column], shards: tuple[int, ...]) -> list[str]:
    """Sometimes add a column that refers to an existing table to `columns`; return its constraint."""
    found = [table for table in maker.tables if len(table.primary) == 1 and set(shards) <= set(table.shards)]
    if not found or not maker.one_in(2):
        return []
    other = maker.draw(st.sampled_from(found))
    (key,) = (other.column(name) for name in other.primary)
    column = Column(maker.name(), key.family, (*key.pool, NULL))
    columns.append(column)
    how = maker.draw(st.sampled_from(REFERENCES))
    return [f"FOREIGN KEY ({column.sql}) REFERENCES {other.sql} ({key.sql}) {how}"]


def make_full(maker: Maker) -> None:
    """Create a table without a key: rows may be equal, and there may be no column at all."""
    (schema, name), shards = maker.place(), maker.shards()
    columns, _ = ([], []) if maker.one_in(6) else maker.columns(0, may_compute=False)
    table = Table(schema, name, tuple(columns), shards=shards)
    definitions = [column.definition for column in columns]
    if columns and maker.one_in(8):
        definitions.append(f"EXCLUDE USING btree ({columns[0].sql} WITH =) DEFERRABLE INITIALLY DEFERRED")
    create_table(maker, table, definitions)
    maker.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL", shards)
    maker.tables.append(table)


def make_append_only(maker: Maker) -> None:
    columns, _ = maker.columns(0)
    table = Table("public", maker.name(APPEND_ONLY_WORD), tuple(columns), is_append_only=True)
    create_table(maker, table, [column.definition for column in columns])
    maker.tables.append(table)


def make_child(maker: Maker, parent: Table) -> None:
    """Create a table that inherits, with the same key and one more column."""
    if parent.leaves or parent.is_append_only or any("IDENTITY" in column.more for column in parent.columns):
        return
    more = maker.column()
    table = replace(parent, name=maker.name(), columns=(*parent.columns, more))
    key, constraint = ", ".join(quoted(name) for name in parent.key), f"CONSTRAINT {quoted(maker.name())}"
    definitions = [more.definition, *([f"{constraint} PRIMARY KEY ({key})"] if key else [])]
    maker.run(f"CREATE TABLE {table.sql} ({', '.join(definitions)}) INHERITS ({parent.sql})", parent.shards)
    if not key:
        maker.run(f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL", parent.shards)
    maker.tables.append(replace(table, primary=table.key, constraint=constraint if key else ""))


def make_partitioned(maker: Maker) -> None:
    (schema, name), shards = maker.place(), maker.shards()
    how, keyed = maker.draw(st.sampled_from(sorted(PARTITIONS))), not maker.one_in(4)
    by = maker.name()
    columns, key = maker.columns(maker.draw(st.sampled_from(KEY_WIDTHS)), by, may_compute=keyed)
    names = tuple(column.name for column in key)
    bounds = [found if found == "DEFAULT" else f"FOR VALUES {found}" for found in PARTITIONS[how]]
    leaves = tuple((maker.name(), found) for found in bounds)
    names = names if keyed else ()
    table = Table(schema, name, tuple(columns), names, names, leaves=leaves, partitioned_by=by, shards=shards)
    definitions = [column.definition for column in columns]
    if keyed:
        definitions.append(f"PRIMARY KEY ({', '.join(column.sql for column in key)})")
    maker.run(f"CREATE TABLE {table.sql} ({', '.join(definitions)}) PARTITION BY {how} ({quoted(by)})", shards)
    for leaf, found in leaves:
        make_leaf(maker, table, leaf, found, is_keyed=keyed)
    maker.tables.append(table)


def make_leaf(maker: Maker, table: Table, leaf: str, bounds: str, *, is_keyed: bool) -> None:
    """Create a partition directly, as a table with reordered columns that is attached, or with its own partitions."""
    name = f"{quoted(table.schema)}.{quoted(leaf)}"
    if maker.one_in(3) and not any("GENERATED" in column.definition for column in table.columns):
        columns = maker.draw(st.permutations([column.definition for column in table.columns]))
        maker.run(f"CREATE TABLE {name} (gone integer, {', '.join(columns)})", table.shards)
        maker.run(f"ALTER TABLE {name} DROP COLUMN gone", table.shards)
        maker.run(f"ALTER TABLE {table.sql} ATTACH PARTITION {name} {bounds}", table.shards)
    elif maker.one_in(5):
        make_branch(maker, table, name, bounds)
    else:
        maker.run(f"CREATE TABLE {name} PARTITION OF {table.sql} {bounds}", table.shards)
    if not is_keyed or (maker.one_in(4) and not any(column.generated for column in table.columns)):
        maker.run(f"ALTER TABLE {name} REPLICA IDENTITY FULL", table.shards)


def make_branch(maker: Maker, table: Table, name: str, bounds: str) -> None:
    """Create a partition that has partitions; those of a table without a key are FULL."""
    by = table.column(table.partitioned_by).sql
    maker.run(f"CREATE TABLE {name} PARTITION OF {table.sql} {bounds} PARTITION BY HASH ({by})", table.shards)
    for remainder in (0, 1):
        leaf = f"{quoted(table.schema)}.{quoted(maker.name())}"
        of = f"FOR VALUES WITH (MODULUS 2, REMAINDER {remainder})"
        maker.run(f"CREATE TABLE {leaf} PARTITION OF {name} {of}", table.shards)
        if not table.key:
            maker.run(f"ALTER TABLE {leaf} REPLICA IDENTITY FULL", table.shards)


def make_trigger(maker: Maker) -> None:
    """Create a trigger that logs the changes of a table's rows in a table that statements write to as well."""
    of = maker.draw(st.sampled_from(maker.tables))
    name, function = maker.name(), f"public.{quoted(maker.name())}"
    seen = Column("id", INTEGER, ("DEFAULT",), "GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY")
    texts = (Column("op", TEXT, ("'x'", NULL)), Column("what", TEXT, ("'y'", NULL)))
    table = Table("public", name, (seen, *texts), ("id",), ("id",), shards=of.shards)
    create_table(maker, table, [column.definition for column in table.columns])
    body = f"BEGIN INSERT INTO {table.sql} (op, what) VALUES (TG_OP, NEW::text); RETURN NULL; END"
    maker.run(f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS {literal(body)}", of.shards)
    when = "AFTER INSERT OR UPDATE OR DELETE"
    maker.run(
        f"CREATE TRIGGER {quoted(maker.name())} {when} ON {of.sql} FOR EACH ROW EXECUTE FUNCTION {function}()",
        of.shards,
    )
    maker.tables.append(table)


def create_table(maker: Maker, table: Table, definitions: Sequence[str], how: str = "") -> None:
    maker.run(f"CREATE {how}TABLE {table.sql} ({', '.join(definitions)})", table.shards)


def make_sequence(maker: Maker) -> None:
    """Create a sequence of any kind that no column owns."""
    name = f"{quoted(maker.draw(st.sampled_from(maker.schemas)))}.{quoted(maker.name())}"
    maker.run(f"CREATE SEQUENCE {name} {maker.draw(st.sampled_from(SEQUENCES))}")
    maker.sequences.append(name)


def make_schema(maker: Maker) -> None:
    """Create everything that a database has before its first snapshot."""
    for extension in EXTENSIONS:
        maker.run(f"CREATE EXTENSION {extension} SCHEMA public")
    for schema in (SCHEMAS[1], DOTTED[0][0]):
        maker.run(f"CREATE SCHEMA {quoted(schema)}")
    make_types(maker)
    make_keyed(maker)
    for _ in range(maker.draw(st.integers(2, TABLES_MAX))):
        make_table(maker)
    if maker.one_in(4):
        make_trigger(maker)
    for _ in range(maker.draw(st.integers(0, 2))):
        make_sequence(maker)
