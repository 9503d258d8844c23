"""Whether what was read from JSON has the types that its dataclass says, all the way down.

JSON has no types of ours, and Python takes nearly anything anywhere: a text where a number belongs would be found only
where somebody computes with it, halfway through a restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

INTEGER_MAX = 2**63 - 1
# Raises TypeError or ValueError, whose text goes on from the name of the place.
Check: TypeAlias = Callable[[Any], None]


def check_types(value: Any, kind: Any, where: str = "") -> None:
    """Raise TypeError or ValueError naming the place unless `value` is a `kind`, and all in it what it must be.

    Integers are of 64 bits, other numbers finite, texts such that UTF-8 has them.
    """
    try:
        _check_of(kind)(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}{error}".lstrip(".")) from error


def check_time(text: str) -> None:
    """Raise ValueError unless `text` is a time with its zone (RFC 3339)."""
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text} has no time zone")


@cache
def _check_of(kind: Any) -> Check:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _check_of_dataclass(kind)
    if origin in (Union, UnionType):
        (inner,) = (_check_of(one) for one in arguments if one is not NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        if arguments[-1] is not Ellipsis:
            return lambda value: _check_fixed(value, [_check_of(one) for one in arguments])
        return _check_of_items(tuple, enumerate, _check_of(arguments[0]), "[{}]")
    if origin in (Mapping, dict):
        names, inner = (_check_of(one) for one in arguments)

        def check(value: Any) -> None:
            for name in value if isinstance(value, dict) else ():
                names(name)
            items(value)

        items = _check_of_items(dict, lambda value: value.items(), inner, ".{}")
        return check
    plain = {Any: lambda _: None, str: _check_text, int: _check_integer, float: _check_number}
    return plain.get(kind, lambda value: _is_a(value, kind))


def _check_of_dataclass(kind: type) -> Check:
    hints = get_type_hints(kind)
    checks = [(field.name, _check_of(hints[field.name])) for field in fields(kind)]

    def check(value: Any) -> None:
        _is_a(value, kind)
        for name, inner in checks:
            try:
                inner(getattr(value, name))
            except (TypeError, ValueError) as error:
                raise type(error)(f".{name}{error}") from error

    return check


def _check_of_items(kind: type, items: Callable[[Any], Any], inner: Check, place: str) -> Check:
    def check(value: Any) -> None:
        _is_a(value, kind)
        for name, one in items(value):
            try:
                inner(one)
            except (TypeError, ValueError) as error:
                raise type(error)(place.format(name) + str(error)) from error

    return check


def _check_fixed(value: Any, checks: list[Check]) -> None:
    _is_a(value, tuple)
    for check, one in zip(checks, value, strict=True):
        check(one)


def _is_a(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError(f" is a {type(value).__name__}, no {kind.__name__}")


def _check_text(value: Any) -> None:
    _is_a(value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(" is not text that UTF-8 has") from None


def _check_integer(value: Any) -> None:
    _is_a(value, int)
    if not -INTEGER_MAX <= value <= INTEGER_MAX:
        raise ValueError(" is larger than any there can be")


def _check_number(value: Any) -> None:
    if type(value) is int:
        _check_integer(value)
        return
    _is_a(value, float)
    if not math.isfinite(value):
        raise ValueError(f" is {value}")
