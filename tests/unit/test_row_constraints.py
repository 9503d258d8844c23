"""Rows that break a constraint of the DDL are told from those that don't, by the text of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cutline.columns.bytes_column import from_list
from cutline.nodes.groups import Column, Group
from cutline.restore.drill.check_expressions import CheckColumn, NotUnderstoodError, read_check
from cutline.restore.drill.row_constraints import (
    AddedValues,
    Breach,
    ShardRules,
    compile_constraints,
    evaluate,
)
from cutline.restore.drill.row_fields import FieldsMissingError, RowFields, compare
from cutline.snapshots.ddl.described_constraints import (
    Attached,
    Check,
    Constraints,
    Domain,
    ForeignKey,
    ListBound,
    RangeBound,
    UniqueKey,
)
from cutline.snapshots.ddl.described_ddl import DescribedColumn, DescribedTable, Description
from cutline.snapshots.ddl.quoted_names import Name

TYPES = {
    "integer": 23, "bigint": 20, "text": 25, "numeric": 1700, "date": 1082, "timestamp without time zone": 1114,
    "character varying": 1043, "float8": 701, "public.positive": 50000, "public.pair": 50001, "public.of_pair": 50002,
}  # fmt: skip
COLUMNS = {
    "i": CheckColumn(0, "integer"), "n": CheckColumn(1, "number"), "t": CheckColumn(2, "text"),
    "d": CheckColumn(3, "date"), "j": CheckColumn(4, "integer"), "o": CheckColumn(5, None),
}  # fmt: skip


def group(number: int, table: str, columns: Mapping[str, str], key_width: int = 1) -> Group:
    of = tuple(Column(name, type_, TYPES[type_], -1, at) for at, (name, type_) in enumerate(columns.items()))
    return Group(number, "public", table, "default" if key_width else "full", key_width, of)


def rules(*groups: Group, described: Description | None = None, **constraints: Any) -> ShardRules:
    return compile_constraints(groups, Constraints(**constraints), described or Description())


def found(of: ShardRules, number: int, *lines: bytes) -> tuple[dict[tuple[int, int, int], list[bytes]], list[Breach]]:
    """The values by group, set and reference, and the breaches of the rows of a table."""
    values, breaches = dict[tuple[int, int, int], list[bytes]](), list[Breach]()
    for one in evaluate(of.tables, np.full(len(lines), number), from_list(list(lines))):
        if isinstance(one, AddedValues):
            column = one.values
            texts = [column.part(slice(at, at + 1)).data.tobytes() for at in range(len(column))]
            values[one.use.group, one.use.number, one.use.reference] = texts
        else:
            breaches.append(one)
    return values, breaches


def test_fields_are_found_by_place_and_joined_in_any_order() -> None:
    lines = from_list([b"1\t\\N\tx y\n", b"22\t\t\\\\N\n"])
    for part, rows in ((lines, [0, 1]), (lines.part(slice(1, 2)), [1])):
        fields = RowFields(part, 3)
        joined = fields.joined((2, 0))
        expected = [[b"x y\t1", b"\\\\N\t22"][row] for row in rows]
        assert [joined.part(slice(at, at + 1)).data.tobytes() for at in range(len(rows))] == expected
        assert fields.joined((0, 1)).part(slice(0, 1)).data.tobytes() == [b"1\t\\N", b"22\t"][rows[0]]
        assert fields.nulls(1).tolist() == [[True, False][row] for row in rows]
        assert fields.nulls(2).tolist() == [False] * len(rows)
    for wrong in ([b"1\t2\n"], [b"1\t2\n", b"1\t2\t3\t4\n", b"1\t2\t3\n"]):
        with pytest.raises(FieldsMissingError) as error:
            RowFields(from_list(wrong), 3)
        assert error.value.lines == min(len(wrong), 2)


def test_a_unique_key_and_its_references_add_values_to_one_set() -> None:
    account = group(3, "account", {"id": "bigint", "owner": "text", "branch": "integer"})
    transfer = group(5, "transfer", {"id": "bigint", "by": "text", "at": "integer", "to": "integer"})
    unique = UniqueKey("of_branch", ("public", "account"), ("owner", "branch"))
    to_key = ForeignKey("to_fkey", ("public", "transfer"), ("to",), ("public", "account"), ("id",))
    to_both = ForeignKey("b", ("public", "transfer"), ("at", "by"), ("public", "account"), ("branch", "owner"))
    of = rules(account, transfer, unique=(unique,), references=(to_key, to_both))
    assert (of.evaluated, of.others) == (3, 0)
    # The set of the unique key is 1; the key of the account is set 0 of its group.
    assert found(of, 3, b"1\tx\t7\n", b"2\t\\N\t7\n") == ({(0, 1, 0): [b"7\tx"]}, [])
    values, _ = found(of, 5, b"1\tx\t7\t1\n", b"2\t\\N\t7\t\\N\n")
    assert values == {(3, 0, 1): [b"1"], (0, 1, 1): [b"7\tx"]}
    assert of.references == {(3, 0): (to_key,), (0, 1): (to_both,)}


def test_null_is_a_value_only_if_the_key_says_so() -> None:
    table = group(3, "t", {"id": "integer", "a": "text"})
    unique = UniqueKey("u", ("public", "t"), ("a",), counts_nulls=True)
    assert found(rules(table, unique=(unique,)), 3, b"1\t\\N\n")[0] == {(0, 1, 0): [b"\\N"]}


def test_partitions_are_referenced_through_their_parent() -> None:
    low, high = (group(number, name, {"id": "integer"}) for number, name in ((1, "low"), (2, "high")))
    other = group(3, "other", {"id": "integer", "to": "bigint"})
    parent: Name = ("public", "parts")
    attached = {("public", name): Attached(parent, None) for name in ("low", "high")}
    key = ForeignKey("f", ("public", "other"), ("to",), parent, ("id",))
    of = rules(low, high, other, attached=attached, references=(key,))
    assert found(of, 1, b"4\n")[0] == found(of, 2, b"4\n")[0] == {(0, 1, 0): [b"4"]}
    assert found(of, 3, b"1\t4\n")[0] == {(0, 1, 1): [b"4"]}
    # A partition without rows in the snapshot may have the value.
    assert rules(low, other, attached=attached, references=(key,)).references == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "own_collations", "is_compared"),
    [
        ("integer", "bigint", False, True),
        ("character varying", "text", False, True),
        ("character varying", "text", True, False),
        # Equal numerics and doubles may have other texts, and so may values of an unknown type.
        ("numeric", "numeric", False, False),
        ("float8", "float8", False, False),
        ("integer", "numeric", False, False),
        ("public.positive", "public.positive", False, False),
    ],
)
def test_references_are_compared_if_equal_values_have_one_text(
    ours: str, theirs: str, own_collations: bool, is_compared: bool  # noqa: FBT001  # a case
) -> None:  # fmt: skip
    a, b = group(1, "a", {"id": theirs}), group(2, "b", {"id": "integer", "to": ours})
    key = ForeignKey("f", ("public", "b"), ("to",), ("public", "a"), ("id",))
    of = rules(a, b, references=(key,), has_own_collations=own_collations)
    assert (bool(of.references), of.others) == (is_compared, int(not is_compared))


@pytest.mark.parametrize(
    ("bound", "method", "type_", "wrong"),
    [
        (RangeBound(("0",), ("10",)), "RANGE", "integer", [b"-1", b"10", b"\\N"]),
        (RangeBound(("MINVALUE",), ("10",)), "RANGE", "integer", [b"10", b"\\N"]),
        (RangeBound(("2026-01-01",), ("2026-02-01",)), "RANGE", "date", [b"2025-12-31", b"2026-02-01", b"\\N"]),
        (ListBound(frozenset({"a", None})), "LIST", "text", [b"b", b"-1", b"10", b"9"]),
    ],
)
def test_rows_outside_the_bounds_of_their_partition_are_found(
    bound: RangeBound | ListBound, method: Any, type_: str, wrong: list[bytes]
) -> None:
    attached = {("public", "low"): Attached(("public", "parts"), bound)}
    partitioned = {("public", "parts"): (method, ("id",))}
    of = rules(group(1, "low", {"k": "integer", "id": type_}), attached=attached, partitioned=partitioned)
    candidates: dict[str, list[bytes]] = {
        "integer": [b"-1", b"0", b"9", b"10", b"\\N"],
        # Years that are not of four digits, and AD, are not compared as texts.
        "date": [b"2025-12-31", b"2026-01-31", b"2026-02-01", b"infinity", b"10000-01-01", b"0044-03-15 BC", b"\\N"],
        "text": [b"a", b"b", b"-1", b"10", b"9", b"\\N"],
    }
    lines = [b"1\t" + value + b"\n" for value in candidates[type_]]
    each = [value for value, line in zip(candidates[type_], lines, strict=True) if found(of, 1, line)[1]]
    assert sorted(each) == sorted(wrong)
    (breach,) = found(of, 1, *lines)[1]
    assert (breach.count, "of public.parts" in breach.what) == (len(wrong), True)


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ('(("i" >= 3))', [b"-1\t\\N\ta\t\\N\t0\t\\N\n"]),
        ('((3 <= "i"))', [b"-1\t\\N\ta\t\\N\t0\t\\N\n"]),
        ("((\"n\" > '-1'::integer))", [b"0\t-1.0\ta\t\\N\t0\t\\N\n", b"0\t-2.50\ta\t\\N\t0\t\\N\n"]),
        ('(("n" < (1)::numeric))', [b"0\t1.00\ta\t\\N\t0\t\\N\n"]),
        ('(("t" = ANY (ARRAY[\'a\'::"text", \'b\'::"text"])))', [b"0\t0\tc\t\\N\t0\t\\N\n"]),
        ('(("t")::"text" <> ALL ((ARRAY[\'c\'::character varying])::"text"[]))', [b"0\t0\tc\t\\N\t0\t\\N\n"]),
        ('(("d" > \'2026-01-01\'::"date"))', [b"0\t0\ta\t2025-06-01\t0\t\\N\n"]),
        ('((("i" IS NULL) OR ("i" <= "j")))', [b"5\t0\ta\t\\N\t4\t\\N\n"]),
        ('(((NOT ("i" = 7)) AND ("o" IS NOT NULL)))', [b"7\t0\ta\t\\N\t0\tx\n", b"6\t0\ta\t\\N\t0\t\\N\n"]),
    ],
)
def test_a_check_refuses_the_rows_for_which_it_is_false(expression: str, wrong: list[bytes]) -> None:
    condition = read_check(expression, COLUMNS)
    # NULL in the compared columns satisfies a check.
    fits = [b"\\N\t\\N\t\\N\t\\N\t\\N\tx\n", b"3\t0.5\ta\t2026-06-01\t3\tx\n"]
    truth = condition.evaluate(RowFields(from_list([*fits, *wrong]), 6))
    assert truth.false.tolist() == [False] * len(fits) + [True] * len(wrong)
    assert truth.true.tolist()[1]


@pytest.mark.parametrize(
    "expression",
    [
        '(("char_length"("t") > 3))',
        '(("t" > \'a\'::"text"))',
        '(("i" OPERATOR("public".=) 0))',
        '(("t" ~ \'^a\'::"text"))',
        '(("i" > 0) AND)',
        '((("i" + 1) > 0))',
        '(("d" > \'infinity\'::"date"))',
        '(("o" = 1))',
        '(("unknown" > 1))',
        '(("t" = E\'\\\\\'::"text"))',
        '(("i" = \'a\'::"text"))',
        "((\"i\" > '5'::double precision))",
        "(NOT " * 200 + '("i" > 0)' + ")" * 200,
    ],
)
def test_an_expression_of_another_form_is_not_understood(expression: str) -> None:
    with pytest.raises(NotUnderstoodError):
        read_check(expression, COLUMNS)


def test_numbers_that_a_double_does_not_tell_apart_are_not_decided() -> None:
    fields = from_list([b"0.10000000000000000001", b"0.1", b"0.2", b"NaN"])
    sign, is_decided = compare(fields, "0.1", "number")
    assert is_decided.tolist() == [False, True, True, False]
    assert sign.tolist()[1:3] == [0, 1]


def test_breaches_of_rows_name_the_constraint_and_a_value() -> None:
    table = group(4, "t", {"id": "integer", "dom": "public.positive", "v": "text"})
    described = Description({("public", "t"): DescribedTable((DescribedColumn("v", "text", is_not_null=True),))})
    domains = {("public", "positive"): Domain("integer", (Check("p", "((VALUE > 0))"),))}
    checks = {("public", "t"): (Check("small", '(("id" < 10))'), Check("other", '(("f"("id")))'))}
    of = rules(table, described=described, domains=domains, checks=checks)
    assert (of.evaluated, of.others) == (2, 1)
    _, breaches = found(of, 4, b"10\t1\tx\n", b"2\t-5\tx\n", b"3\t0\tx\n", b"4\t4\t\\N\n")
    assert breaches == [
        Breach(4, "violate CHECK constraint small", "id is 10", 1),
        Breach(4, "violate CHECK constraint p of the domain of column dom", "dom is -5", 2),
        Breach(4, "have NULL in column v, which is NOT NULL", "", 1),
    ]


@pytest.mark.parametrize("type_", ["public.pair", "public.of_pair"])
def test_a_row_value_is_null_if_all_its_fields_are(type_: str) -> None:
    """The manual, "Comparison Functions and Operators": so the text of the field does not tell."""
    table = group(4, "t", {"id": "integer", "p": type_})
    domains = {("public", "of_pair"): Domain("public.pair", (Check("d", "(VALUE IS NULL)"),))}
    checks = {("public", "t"): (Check("c", '(("p" IS NULL))'),)}
    of = rules(table, domains=domains, checks=checks)
    assert (of.evaluated, of.others) == (0, 1 if type_ == "public.pair" else 2)
    assert found(of, 4, b"1\t(,)\n") == ({}, [])


def test_rows_of_several_tables_in_any_order_are_evaluated() -> None:
    groups = group(1, "a", {"id": "integer"}), group(2, "b", {"id": "integer", "v": "integer"})
    checks = {("public", "b"): (Check("c", '(("v" > 0))'),)}
    of = rules(*groups, checks=checks)
    lines = from_list([b"1\t0\n", b"5\n", b"2\t1\n", b"3\t-1\n"])
    breaches = list(evaluate(of.tables, np.array([2, 1, 2, 2]), lines))
    assert breaches == [Breach(2, "violate CHECK constraint c", "v is 0", 2)]
