from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cutline.fleet.config import GroupRules
from cutline.fleet.record import INTEGER_MAX, fields_of, from_json
from cutline.fleet.table_names import is_included, is_schema_named, quote_identifier, table_name
from cutline.nodes.groups import Column, Group, Table, column_list, list_names, number_groups, qualify

COUNTS = st.integers(0, INTEGER_MAX)
COLUMNS = st.builds(Column, st.text(min_size=1), st.text(), st.integers(0, 2**32), st.integers(-1, 2**31), COUNTS)
GROUPS = st.builds(
    Group,
    st.integers(1, INTEGER_MAX),
    st.text(min_size=1),
    st.text(min_size=1),
    st.sampled_from(["default", "index", "full", "append_only"]),
    st.integers(0, 3),
    st.lists(COLUMNS, max_size=4).map(tuple),
    st.integers(0, 10).map(lambda power: 1 << power),
)


def table(name: str, *, rows: int = 0, size: int = 0, key_width: int = 1, identity: str = "default") -> Table:
    columns = (Column("id", "integer", 23, -1, 0), Column("v", "text", 25, -1, 1))
    group = Group(0, "public", name, identity, key_width, columns)
    return Table(1, group, rows, size, readable=True, key_is_immediate=True)


@given(GROUPS)
def test_a_group_round_trips_through_json(group: Group) -> None:
    assert from_json(json.dumps(fields_of(group)), Group) == group


@given(st.lists(GROUPS))
@example([Group(1, "a.b", "c", "default", 1, ()), Group(2, "d", "e", "default", 1, ())])
@example([Group(1, 'a"b', "c", "default", 1, ())])
def test_names_in_a_list_are_those_of_the_groups(groups: list[Group]) -> None:
    assert list_names(groups) == [group.name for group in groups]


def test_the_same_table_has_one_number_on_all_shards() -> None:
    found = number_groups({"s1": [table("b"), table("c")], "s2": [table("a"), table("b")]}, 1000)
    numbers = {(shard, one.group.table): one.group.number for shard, tables in found.items() for one in tables}
    assert numbers == {("s1", "b"): 2, ("s1", "c"): 3, ("s2", "a"): 1, ("s2", "b"): 2}


def test_a_table_with_a_key_on_some_shards_only_has_two_numbers() -> None:
    keyless = table("t", key_width=0, identity="full")
    found = number_groups({"s1": [table("t"), table("u")], "s2": [keyless], "s3": [keyless]}, 1000)
    numbers = {shard: tables[0].group.number for shard, tables in found.items()}
    assert numbers["s1"] != numbers["s2"] == numbers["s3"]
    assert len({one.group.number for tables in found.values() for one in tables}) == 3


@pytest.mark.parametrize(("rows", "size", "partitions"), [
    (0, 0, 1), (1000, 0, 1), (1001, 0, 2), (2001, 0, 4), (4001, 0, 8), (10**9, 0, 1024),
    # A table that was never analysed reports 0 rows: its size counts.
    (0, 256 * 3000, 4),
])  # fmt: skip
def test_partitions_are_a_power_of_two_and_follow_the_largest_copy(rows: int, size: int, partitions: int) -> None:
    found = number_groups({"s1": [table("t", rows=rows, size=size)], "s2": [table("t")]}, 1000)
    assert [tables[0].group.partitions for tables in found.values()] == [partitions, partitions]


@pytest.mark.parametrize(("name", "expected"), [
    ("public.a", True), ("public.ab", False), ("audit.log", False), ("audit.keep", False), ("other.a", False),
])  # fmt: skip
def test_rules_include_and_then_exclude(name: str, *, expected: bool) -> None:
    rules = GroupRules(include=("public.*", "audit.keep"), exclude=("audit.*", "public.?b"))
    assert is_included(name, rules) is expected


def test_names_with_any_characters_are_quoted() -> None:
    assert quote_identifier('a"b') == '"a""b"'
    group = Group(1, "Odd", "a.b", "default", 1, (Column("x y", "int", 23, -1, 0), Column('"', "int", 23, -1, 1)))
    assert qualify(group) == '"Odd"."a.b"'
    assert column_list(group) == '"x y", """"'


def test_a_table_without_replica_identity_is_inadmissible_and_has_a_remedy() -> None:
    assert table("t").is_admissible
    assert table("t", key_width=0, identity="full").is_admissible
    assert table("t", key_width=0, identity="append_only").is_admissible
    nothing = table("t", key_width=0, identity="nothing")
    assert not nothing.is_admissible
    assert nothing.remedy == 'ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT'


def test_a_definition_leaves_out_what_the_chain_assigned() -> None:
    found = number_groups({"s1": [table("t", rows=10**6)]}, 1000)["s1"][0].group
    assert found != table("t").group
    assert found.definition() == table("t").group.definition()


def test_no_two_tables_have_one_name() -> None:
    parts = ["a", "a.b", "b", "b.c", "c", '"a"', 'a".b', '"', '""', ".", '"a".b', "a.", ".b"]
    names = {table_name(schema, table) for schema in parts for table in parts}
    assert len(names) == len(parts) ** 2
    assert table_name("public", "t e%s") == "public.t e%s"
    assert (table_name("a.b", "c"), table_name("a", 'b"')) == ('"a.b".c', 'a."b"""')


def test_patterns_match_names_with_and_without_quotes() -> None:
    assert is_included(table_name("a.b", "c"), GroupRules(include=("a.b.c",)))
    assert is_included(table_name("a.b", "c"), GroupRules(include=('"a.b".*',)))
    assert not is_included(table_name("a", "b.c"), GroupRules(include=('"a.b".*',)))
    assert is_included(table_name("a", 'b"'), GroupRules(include=('a.b"',)))


ORDER, DOTTED, ODD = ("Tenant 01 GmbH", "Order"), ("Tenant 02 Ltd.", "Order"), ('Tenant 03 " Inc', "Order")


@pytest.mark.parametrize(
    ("pattern", "tables"),
    [
        ('"Tenant 01 GmbH"."Order"', {ORDER}),
        ('Tenant 01 GmbH."Order"', {ORDER}),
        ('"Tenant 01 GmbH".Order', {ORDER}),
        ('"Tenant 01 GmbH".*', {ORDER}),
        ('"Tenant 02 Ltd."."Order"', {DOTTED}),
        ("Tenant 02 Ltd..Order", {DOTTED}),
        ('"Tenant 03 "" Inc"."Order"', {ODD}),
        ('*."Order"', {ORDER, DOTTED, ODD}),
        ('"Tenant ?? *"."Ord??"', {ORDER, DOTTED, ODD}),
        ('"Tenant 01 GmbH"."order"', set()),
        ('"Tenant 01 GmbH.Order"', set()),
        ('"Tenant 01 GmbH"', set()),
        # A quote that is not closed, or stands within a part, is part of the name.
        ('*"*.Order', {DOTTED, ODD}),
        ('"Tenant 01 GmbH.Order', set()),
    ],
)
def test_a_pattern_may_quote_every_part_as_in_sql(pattern: str, tables: set[tuple[str, str]]) -> None:
    found = {table for table in (ORDER, DOTTED, ODD) if is_included(table_name(*table), GroupRules(include=(pattern,)))}
    assert found == tables


@pytest.mark.parametrize("schema", ["Tenant 01 GmbH", 'a "quote"', "plain"])
def test_a_schema_may_be_quoted(schema: str) -> None:
    assert is_schema_named(schema, [schema])
    assert is_schema_named(schema, [quote_identifier(schema)])
    assert not is_schema_named(schema, [schema.upper(), ""])
