"""Changes of what is no table: labels and fields of types, and what belongs to no table's rows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz.names import numbered, quoted
from tests.fuzz.schemas import SCHEMAS, Maker
from tests.fuzz.tables import SHARDS
from tests.fuzz.values import literal


def alter_object(maker: Maker) -> None:
    """Draw one change."""
    kind = maker.draw(st.integers(0, 4))
    if kind < 2 and maker.labels:
        alter_enum(maker)
    elif kind == 2 and maker.composed:
        alter_composite(maker)
    elif kind == 3:
        maker.make_types()
    else:
        make_object(maker)


def alter_enum(maker: Maker) -> None:
    """A label more, anywhere, or another name for one."""
    name = maker.draw(st.sampled_from(sorted(maker.labels)))
    labels = maker.labels[name]
    maker.numbers += 1
    label = literal(numbered("label", maker.numbers))
    if maker.one_in(3):
        maker.run(f"ALTER TYPE {name} RENAME VALUE {labels[0]} TO {label}")
        replace_in_pools(maker, f"{labels[0]}::{name}", f"{label}::{name}")
        labels[0] = label
        return
    where = maker.draw(st.sampled_from(["", f" BEFORE {labels[0]}", f" AFTER {labels[0]}"]))
    maker.run(f"ALTER TYPE {name} ADD VALUE {label}{where}")
    labels.append(label)
    for place, table in enumerate(maker.tables):
        columns = (
            replace(one, pool=(*one.pool, f"{label}::{name}")) if one.family.type == name else one
            for one in table.columns
        )
        maker.tables[place] = replace(table, columns=tuple(columns))


def alter_composite(maker: Maker) -> None:
    """A field more."""
    name = maker.draw(st.sampled_from(maker.composed))
    maker.run(f"ALTER TYPE {name} ADD ATTRIBUTE {quoted(maker.name())} integer CASCADE")
    replace_in_pools(maker, f")::{name}", f", 7)::{name}")


def replace_in_pools(maker: Maker, old: str, new: str) -> None:
    """Write another expression for a value wherever it is used."""
    for place, table in enumerate(maker.tables):
        columns = (replace(one, pool=tuple(value.replace(old, new) for value in one.pool)) for one in table.columns)
        maker.tables[place] = replace(table, columns=tuple(columns))
    maker.families = [
        replace(one, edges=tuple(value.replace(old, new) for value in one.edges)) for one in maker.families
    ]


def make_object(maker: Maker) -> None:
    """What belongs to no table's rows."""
    name = f"{quoted(maker.draw(st.sampled_from(SCHEMAS)))}.{quoted(maker.name())}"
    table = maker.draw(st.sampled_from(maker.tables)) if maker.tables else None
    kind = maker.draw(st.integers(0, 7 if table else 4))
    if kind == 0:
        maker.run(f"CREATE VIEW {name} AS SELECT 1 AS one")
    elif kind == 1:
        maker.run(f"CREATE MATERIALIZED VIEW {name} AS SELECT 1 AS one")
    elif kind == 2:
        maker.run(f"CREATE FUNCTION {name}() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
    elif kind == 3:
        start = maker.draw(st.sampled_from(["1", "-5 MINVALUE -9", "9"]))
        maker.run(f"CREATE SEQUENCE {name} START {start};\nSELECT nextval({literal(name)})")
    elif table is None or kind == 4:
        maker.run(f"CREATE SCHEMA {quoted(maker.name())}", SHARDS)
    elif kind == 5:
        maker.run(f"COMMENT ON TABLE {table.sql} IS {literal(maker.name())}", table.shards)
    elif kind == 6:
        maker.run(f"GRANT SELECT ON {table.sql} TO PUBLIC", table.shards)
    elif table.columns:
        maker.run(f"CREATE INDEX ON {table.sql} (({table.columns[0].sql} IS NULL))", table.shards)
