"""Changes of all but tables: user-defined types, views, functions, sequences, and what tables have besides rows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz.maker import Maker
from tests.fuzz.names import ROLES, numbered, quoted
from tests.fuzz.own_types import make_types
from tests.fuzz.renaming import replace_everywhere
from tests.fuzz.schemas import make_sequence
from tests.fuzz.tables import SHARDS, Table
from tests.fuzz.values import literal


def alter_object(maker: Maker) -> None:
    """Draw a change of one object."""
    kind = maker.draw(st.integers(0, 9))
    if kind < 2 and maker.labels:
        alter_enum(maker)
    elif kind == 2 and maker.composed:
        alter_composite(maker)
    elif kind == 3:
        make_types(maker)
    elif kind == 4 and maker.domains:
        alter_domain(maker)
    elif kind == 5 and (maker.labels or maker.composed or maker.domains):
        rename_type(maker)
    elif kind == 6 and maker.objects:
        alter_other(maker)
    else:
        make_object(maker)


def alter_enum(maker: Maker) -> None:
    """Add a label anywhere, or rename one."""
    name = maker.draw(st.sampled_from(sorted(maker.labels)))
    labels = maker.labels[name]
    maker.numbers += 1
    label = literal(numbered("label", maker.numbers))
    if maker.one_in(3):
        maker.run(f"ALTER TYPE {name} RENAME VALUE {labels[0]} TO {label}")
        replace_everywhere(maker, f"{labels[0]}::{name}", f"{label}::{name}")
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
    """Add, drop or rename a field."""
    name = maker.draw(st.sampled_from(sorted(maker.composed)))
    fields, fresh = maker.composed[name], quoted(maker.name())
    kind = maker.draw(st.integers(0, 3))
    if kind < 2:
        maker.run(f"ALTER TYPE {name} ADD ATTRIBUTE {fresh} integer CASCADE")
        replace_everywhere(maker, f")::{name}", f", 7)::{name}")
        maker.composed[name] = [*fields, fresh]
    elif kind == 2:
        maker.run(f"ALTER TYPE {name} RENAME ATTRIBUTE {fields[0]} TO {fresh} CASCADE")
        maker.composed[name] = [fresh, *fields[1:]]
    else:
        # Values drawn before have a field too many, and are refused from now on.
        maker.run(f"ALTER TYPE {name} DROP ATTRIBUTE {fields[-1]} CASCADE")
        maker.composed[name] = fields[:-1] or [fresh]


def alter_domain(maker: Maker) -> None:
    """Change a domain's constraints, default or owner."""
    name = maker.draw(st.sampled_from(maker.domains))
    constraint = quoted(maker.name())
    clauses = [
        f"ADD CONSTRAINT {constraint} CHECK (num_nulls(VALUE) < 3)", "SET DEFAULT NULL", "DROP DEFAULT", "SET NOT NULL",
        f"ADD CONSTRAINT {constraint} CHECK (VALUE IS NOT NULL) NOT VALID", f"OWNER TO {quoted(ROLES[0])}",
    ]  # fmt: skip
    maker.run(f"ALTER DOMAIN {name} {maker.draw(st.sampled_from(clauses))}")


def rename_type(maker: Maker) -> None:
    """Rename a type within its schema."""
    old = maker.draw(st.sampled_from([*sorted(maker.labels), *sorted(maker.composed), *maker.domains]))
    fresh = quoted(maker.name())
    schema = next(f"{quoted(one)}." for one in maker.schemas if old.startswith(f"{quoted(one)}."))
    maker.run(f"ALTER TYPE {old} RENAME TO {fresh}")
    replace_everywhere(maker, old, f"{schema}{fresh}")


def make_object(maker: Maker) -> None:
    """Create an object that is not a table, or something for a table."""
    name = f"{quoted(maker.draw(st.sampled_from(maker.schemas)))}.{quoted(maker.name())}"
    table = maker.draw(st.sampled_from(maker.tables)) if maker.tables else None
    kind = maker.draw(st.integers(0, 6 if table else 4))
    if kind == 0:
        of = f"SELECT count(*) FROM {table.sql}" if table and len(table.shards) > 1 else "SELECT 1 AS one"
        maker.run(f"CREATE VIEW {name} AS {of}")
        maker.objects.append(("VIEW", name))
    elif kind == 1:
        maker.run(f"CREATE MATERIALIZED VIEW {name} AS SELECT 1 AS one")
        maker.objects.append(("MATERIALIZED VIEW", name))
    elif kind == 2:
        maker.run(f"CREATE FUNCTION {name}() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
        maker.objects.append(("FUNCTION", name))
    elif kind == 3:
        make_sequence(maker)
    elif table is None or kind == 4:
        maker.run(f"CREATE SCHEMA {quoted(maker.name())}", SHARDS)
    else:
        make_for_table(maker, table)


def make_for_table(maker: Maker, table: Table) -> None:
    """Create something that belongs to a table but not to its rows."""
    name, role = quoted(maker.name()), quoted(ROLES[1])
    first = table.columns[0].sql if table.columns else "tableoid"
    statements = [
        f"COMMENT ON TABLE {table.sql} IS {literal(maker.name())}",
        f"GRANT SELECT, INSERT ON {table.sql} TO PUBLIC",
        f"GRANT SELECT ({first}) ON {table.sql} TO {role} WITH GRANT OPTION",
        f"CREATE INDEX ON {table.sql} (({first} IS NULL))",
        f"CREATE INDEX {name} ON {table.sql} ((1)) WHERE {first} IS NULL",
        f"CREATE STATISTICS {name} ON (({first} IS NULL)), (num_nulls({first})) FROM {table.sql}",
        f"CREATE POLICY {name} ON {table.sql} TO {role} USING ({first} IS NULL)",
        f"CREATE RULE {name} AS ON DELETE TO {table.sql} DO ALSO NOTHING",
        f"COMMENT ON COLUMN {table.sql}.{first} IS {literal(maker.name())}",
    ]
    maker.run(maker.draw(st.sampled_from(statements)), table.shards)


def alter_other(maker: Maker) -> None:
    """Rename, move or drop one of the other objects, or change its owner."""
    kind, name = maker.draw(st.sampled_from(maker.objects))
    fresh = quoted(maker.name())
    maker.objects.remove((kind, name))
    clauses = [f"RENAME TO {fresh}", f"OWNER TO {quoted(ROLES[0])}", f"SET SCHEMA {quoted(maker.schemas[0])}"]
    dropped = f"DROP {kind} {name} CASCADE"
    maker.run(maker.draw(st.sampled_from([dropped, *(f"ALTER {kind} {name} {clause}" for clause in clauses)])))
