"""User-defined types: enums, domains, composite types, ranges."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz.maker import TEXT, Maker
from tests.fuzz.names import numbered, quoted
from tests.fuzz.values import FAMILIES, KEY_FAMILIES, Family, composites, literal, ranges

# The subtype of a range has no modifier.
RANGE_FAMILIES = tuple(one for one in KEY_FAMILIES if "(" not in one.type and " to " not in one.type)
KINDS = ("enum", "domain", "composite", "range")


def make_types(maker: Maker) -> None:
    """Create one type of each of some kinds."""
    for kind in maker.draw(st.lists(st.sampled_from(KINDS), max_size=3, unique=True)):
        schema = quoted(maker.draw(st.sampled_from(maker.schemas)))
        name = f"{schema}.{quoted(maker.name())}"
        if kind == "enum":
            make_enum(maker, name)
        elif kind == "domain":
            make_domain(maker, name)
        elif kind == "composite":
            make_composite(maker, name)
        else:
            of, multi = maker.draw(st.sampled_from(RANGE_FAMILIES)), quoted(maker.name())
            maker.run(f"CREATE TYPE {name} AS RANGE (subtype = {of.type}, multirange_type_name = {multi})")
            maker.families += ranges(name, f"{schema}.{multi}", of)


def make_enum(maker: Maker, name: str) -> None:
    words = maker.draw(st.lists(st.sampled_from(maker.words), min_size=2, max_size=4, unique=True))
    labels = [literal(numbered(word, 0)) for word in words]
    maker.run(f"CREATE TYPE {name} AS ENUM ({', '.join(labels)})")
    maker.labels[name] = labels
    maker.families.append(Family(name, tuple(f"{label}::{name}" for label in labels)))


def make_domain(maker: Maker, name: str) -> None:
    """Create a domain over a built-in or a user-defined type, which may be a domain."""
    of = maker.draw(st.sampled_from([*FAMILIES, *maker.families]))
    default = f" DEFAULT {of.edges[0]}" if maker.one_in(4) else ""
    maker.run(f"CREATE DOMAIN {name} AS {of.type}{default} CHECK (num_nulls(VALUE) < 2)")
    maker.domains.append(name)
    maker.families.append(replace(of, type=name, edges=tuple(f"{value}::{name}" for value in of.edges)))


def make_composite(maker: Maker, name: str) -> None:
    parts = [*maker.draw(st.lists(st.sampled_from([*FAMILIES, *maker.families]), min_size=2, max_size=2)), TEXT]
    names = [quoted(maker.name()) for _ in parts]
    fields = ", ".join(f"{one} {part.type}" for one, part in zip(names, parts, strict=True))
    maker.run(f"CREATE TYPE {name} AS ({fields})")
    maker.composed[name] = names
    maker.families.append(composites(name, parts))
