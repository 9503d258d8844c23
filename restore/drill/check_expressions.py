"""Evaluate CHECK constraints over whole columns, if their meaning follows from the text of the values.

Understood are comparisons of columns with constants and with each other, lists of values, IS NULL, AND, OR and NOT, as
PostgreSQL prints them (ruleutils.c) with all names in quotes. Integers, numerics, dates and timestamps are compared by
order, texts only for equality, because their order depends on the collation. An expression with anything else, such as
a function, is not understood. A row breaks a constraint only if its expression is false: NULL satisfies it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.columns.bytes_column import Flags
from cutline.restore.drill.row_fields import USUAL, Family, RowFields, Signs, compare
from cutline.snapshots.ddl.quoted_names import read_name

TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^']|'')*')|(?P<name>"(?:[^"]|"")*")|(?P<number>[0-9]+(?:\.[0-9]+)?)"""
    r"""|(?P<mark>::|<=|>=|<>|[=<>()\[\],-])|(?P<word>[A-Za-z_]+))"""
)
COMPARISONS: Mapping[str, Callable[[Signs], Flags]] = {
    "=": lambda sign: sign == 0,
    "<>": lambda sign: sign != 0,
    "<": lambda sign: sign < 0,
    "<=": lambda sign: sign <= 0,
    ">": lambda sign: sign > 0,
    ">=": lambda sign: sign >= 0,
}
MIRRORED = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
FAMILIES: Mapping[str, Family] = {
    "smallint": "integer", "integer": "integer", "bigint": "integer", "numeric": "number", "text": "text",
    "character varying": "text", "date": "date", "timestamp without time zone": "timestamp",
}  # fmt: skip
NUMERIC: frozenset[Family] = frozenset({"integer", "number"})
VALUE = "VALUE"
# Conditions with more parentheses inside each other are not read: Python limits how deep functions and pickles nest.
NESTED_MAX = 50


class NotUnderstoodError(ValueError):
    """The expression has a form, a type or an operator that is not understood here."""


class Truth(Struct, frozen=True):
    """For each row: whether a condition is true, and whether it is false. If neither, it is NULL or not decided."""

    true: Flags
    false: Flags


class CheckColumn(Struct, frozen=True):
    """A column: its place in a line, and how its values are compared (None: only with NULL).

    Unless `is_scalar`, its values may be rows, of which `IS NULL` is true if all their fields are NULL.
    """

    place: int
    family: Family | None
    is_scalar: bool = True


class Comparison(Struct, frozen=True):
    """A comparison of a column with a constant (its text), or with another column."""

    column: CheckColumn
    operator: str
    other: str | CheckColumn
    family: Family

    def evaluate(self, fields: RowFields) -> Truth:
        """Compare the fields that are not NULL."""
        known = ~fields.nulls(self.column.place)
        if isinstance(self.other, CheckColumn):
            known &= ~fields.nulls(self.other.place)
        rows = np.flatnonzero(known)
        other = fields.values(self.other.place).take(rows) if isinstance(self.other, CheckColumn) else self.other
        sign, is_decided = compare(fields.values(self.column.place).take(rows), other, self.family)
        holds = COMPARISONS[self.operator](sign)
        true, false = np.zeros(len(fields), np.bool_), np.zeros(len(fields), np.bool_)
        true[rows], false[rows] = holds & is_decided, ~holds & is_decided
        return Truth(true, false)


class IsNull(Struct, frozen=True):
    """Whether a column is NULL."""

    column: CheckColumn

    def evaluate(self, fields: RowFields) -> Truth:
        """Return which fields are NULL."""
        is_null = fields.nulls(self.column.place)
        return Truth(is_null, ~is_null)


class Not(Struct, frozen=True):
    """The opposite of a condition."""

    condition: Condition

    def evaluate(self, fields: RowFields) -> Truth:
        """Negate the condition; NULL stays NULL."""
        truth = self.condition.evaluate(fields)
        return Truth(truth.false, truth.true)


class Every(Struct, frozen=True):
    """Conditions that are all true; with `any`, at least one of them."""

    conditions: tuple[Condition, ...]
    any: bool = False

    def evaluate(self, fields: RowFields) -> Truth:
        """Combine the conditions, in SQL's logic of three values."""
        truths = [condition.evaluate(fields) for condition in self.conditions]
        both, either = np.logical_and.reduce, np.logical_or.reduce
        true, false = [truth.true for truth in truths], [truth.false for truth in truths]
        return Truth(either(true), both(false)) if self.any else Truth(both(true), either(false))


Condition: TypeAlias = Comparison | IsNull | Not | Every
Operand: TypeAlias = CheckColumn | tuple[str, Family | None]


def read_check(expression: str, columns: Mapping[str, CheckColumn], *, compares_text: bool = True) -> Condition:
    """Read the expression of a CHECK constraint; raises NotUnderstoodError.

    `columns` are those of the table, by name, or the value of a domain as VALUE. Without `compares_text`, equal texts
    may have other bytes.
    """
    reader = _ExpressionReader(expression, columns, compares_text)
    condition = reader.condition()
    if reader.at < len(reader.tokens):
        raise NotUnderstoodError(expression)
    return condition


def family_of(type_: str) -> Family | None:
    """Return how values of a type (as format_type prints it, without quotes) are compared."""
    return FAMILIES.get(re.sub(r"\([0-9, ]*\)", "", type_).strip())


class _ExpressionReader(Struct):
    """Reads an expression by descent. `at` is the next token."""

    expression: str
    columns: Mapping[str, CheckColumn]
    compares_text: bool
    tokens: list[tuple[str, str]] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        position = 0
        while position < len(self.expression.rstrip()):
            match = TOKEN.match(self.expression, position)
            if match is None or match.lastgroup is None:
                raise NotUnderstoodError(self.expression)
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        marks = (text if kind == "mark" else "" for kind, text in self.tokens)
        if max(accumulate((mark == "(") - (mark == ")") for mark in marks), default=0) > NESTED_MAX:
            raise NotUnderstoodError(self.expression)

    def condition(self) -> Condition:
        """Read conditions that are connected by OR."""
        return self._connected("OR", lambda: self._connected("AND", self._negatable))

    def _connected(self, word: str, read: Callable[[], Condition]) -> Condition:
        conditions = [read()]
        while self._takes("word", word):
            conditions.append(read())
        return conditions[0] if len(conditions) == 1 else Every(tuple(conditions), any=word == "OR")

    def _negatable(self) -> Condition:
        if self._takes("word", "NOT"):
            return Not(self._negatable())
        begin = self.at
        try:
            return self._comparison()
        except NotUnderstoodError:
            # A parenthesis begins either an operand or a condition.
            self.at = begin
        self._need("(")
        condition = self.condition()
        self._need(")")
        return condition

    def _comparison(self) -> Condition:
        left = self._operand()
        if self._takes("word", "IS"):
            is_not = self._takes("word", "NOT")
            self._need("NULL", "word")
            if not isinstance(left, CheckColumn) or not left.is_scalar:
                raise NotUnderstoodError(self.expression)
            return Not(IsNull(left)) if is_not else IsNull(left)
        operator = self._next("mark")
        if operator not in COMPARISONS:
            raise NotUnderstoodError(self.expression)
        if (is_any := self._takes("word", "ANY")) or self._takes("word", "ALL"):
            self._need("(")
            others = self._array()
            self._need(")")
            return Every(tuple(self._compared(left, operator, other) for other in others), any=is_any)
        return self._compared(left, operator, self._operand())

    def _compared(self, left: Operand, operator: str, right: Operand) -> Comparison:
        if not isinstance(left, CheckColumn):
            if not isinstance(right, CheckColumn):
                raise NotUnderstoodError(self.expression)
            left, operator, right = right, MIRRORED[operator], left
        ours, theirs = left.family, right.family if isinstance(right, CheckColumn) else right[1]
        family = ours
        if ours in NUMERIC and theirs in NUMERIC:
            family = "integer" if ours == theirs == "integer" else "number"
        elif ours != theirs:
            raise NotUnderstoodError(self.expression)
        if family is None or (family == "text" and not (self.compares_text and operator in ("=", "<>"))):
            raise NotUnderstoodError(self.expression)
        if isinstance(right, CheckColumn):
            return Comparison(left, operator, right, family)
        if not USUAL[family].fullmatch(right[0]):
            raise NotUnderstoodError(self.expression)
        return Comparison(left, operator, right[0], family)

    def _array(self) -> list[Operand]:
        if self._takes("mark", "("):
            found = self._array()
            self._need(")")
        else:
            self._need("ARRAY", "word")
            self._need("[")
            found = [self._operand()]
            while self._takes("mark", ","):
                found.append(self._operand())
            self._need("]")
        while self._takes("mark", "::"):
            type_ = self._type()
            if family_of(type_.removesuffix("[]")) is None:
                raise NotUnderstoodError(self.expression)
        return found

    def _operand(self) -> Operand:
        found: Operand
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        self.at += 1
        if kind == "name" or (kind == "word" and text == VALUE):
            column = self.columns.get(read_name(text) if kind == "name" else text)
            if column is None:
                raise NotUnderstoodError(self.expression)
            found = column
        elif kind == "string":
            found = text[1:-1].replace("''", "'"), None
        elif kind == "number":
            found = text, "number" if "." in text else "integer"
        elif (kind, text) == ("mark", "-"):
            number = self._next("number")
            found = f"-{number}", "number" if "." in number else "integer"
        elif (kind, text) == ("mark", "("):
            found = self._operand()
            self._need(")")
        else:
            raise NotUnderstoodError(self.expression)
        while self._takes("mark", "::"):
            found = self._cast(found, family_of(self._type()))
        return found

    def _cast(self, operand: Operand, family: Family | None) -> Operand:
        """Return the operand after a cast that does not change its text; a string becomes a value of the type."""
        if family is None:
            raise NotUnderstoodError(self.expression)
        if isinstance(operand, CheckColumn):
            if operand.family != family and (operand.family, family) != ("integer", "number"):
                raise NotUnderstoodError(self.expression)
            return replace(operand, family=family)
        text, ours = operand
        if ours not in (None, family) and (ours, family) != ("integer", "number"):
            raise NotUnderstoodError(self.expression)
        return text, family

    def _type(self) -> str:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        words: list[str] = []
        if kind == "name":
            words.append(read_name(text))
            self.at += 1
        while self.at < len(self.tokens) and self.tokens[self.at][0] == "word" and self.tokens[self.at][1].islower():
            words.append(self.tokens[self.at][1])
            self.at += 1
        if self._takes("mark", "["):
            self._need("]")
            return f"{' '.join(words)}[]"
        return " ".join(words)

    def _takes(self, kind: str, text: str) -> bool:
        is_next = self.at < len(self.tokens) and self.tokens[self.at] == (kind, text)
        self.at += is_next
        return is_next

    def _need(self, text: str, kind: str = "mark") -> None:
        if not self._takes(kind, text):
            raise NotUnderstoodError(self.expression)

    def _next(self, kind: str) -> str:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == kind:
            self.at += 1
            return self.tokens[self.at - 1][1]
        raise NotUnderstoodError(self.expression)
