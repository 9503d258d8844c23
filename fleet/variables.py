"""Environment variables in fleet.toml: `${NAME}`."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.storage.errors import remember_secret

# What libpq itself hides wherever it shows parameters.
SECRET_PARAMETERS = frozenset(
    option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults() if option.dispchar == b"*"
)
URI_BEGINNINGS = ("postgresql://", "postgres://")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class VariableMissingError(ValueError):
    """A variable that fleet.toml names is not in the environment."""


def expand(key: str, text: str) -> str:
    """The text with the values of its variables; raise ValueError, which names `key`, if one is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise VariableMissingError(f"{key} uses ${{{name}}}, which is not in the environment")
        return os.environ[name]

    return VARIABLE.sub(value, text)


def expand_dsn(key: str, dsn: str) -> str:
    """The dsn, in which each variable stands for a value, or for a part of one: none can add parameters.

    A dsn that is one variable is taken from there as a whole.
    """
    if VARIABLE.fullmatch(dsn):
        dsn = expand(key, dsn)
        _parse_dsn(key, dsn)
        return dsn
    # Placeholders that mean nothing in a connection string, neither in a URI nor in its other form.
    names = [found[1] for found in VARIABLE.finditer(dsn)]
    marks = {f"cutline{number}variable{secrets.token_hex(8)}": name for number, name in enumerate(names)}
    if not marks:
        _parse_dsn(key, dsn)
        return dsn
    remaining = iter(marks)
    given = _parse_dsn(key, VARIABLE.sub(lambda _: next(remaining), dsn))
    for mark, name in marks.items():
        value = expand(key, f"${{{name}}}")
        given = {parameter: text.replace(mark, value) for parameter, text in given.items()}
    return make_conninfo("", **given)


def remember_secrets_of(dsn: str) -> None:
    """Let no error show the dsn's secrets, unless it says the same in the clear: the password of `postgres`, say."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    shown = {text for parameter, text in given.items() if parameter not in SECRET_PARAMETERS}
    for parameter in SECRET_PARAMETERS & given.keys():
        if given[parameter] not in shown:
            remember_secret(given[parameter])


def _parse_dsn(key: str, dsn: str) -> dict[str, str]:
    """The parameters of the dsn; raise ValueError, which shows nothing of it."""
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
        if not _is_misread(dsn, given):
            return given
    except psycopg.Error:
        pass
    raise ValueError(f"{key} is not a valid connection string (in a URI, write special characters as %XX)")


def _is_misread(dsn: str, given: Mapping[str, str]) -> bool:
    """Whether libpq takes a part of the URI's password for another parameter, which messages show.

    In a password, `@` and `/` end the part of the URI in which it stands. After `?`, `@` is only text.
    """
    if not dsn.startswith(URI_BEGINNINGS):
        return False
    # libpq takes what is before the first `@` for user and password, unless there is a `/` in it.
    after = re.sub(r"^[^@/]*@", "", dsn.partition("://")[2])
    is_port = re.fullmatch(r"[0-9,]*|cutline[0-9]+variable[0-9a-f]+", given.get("port", ""))
    return "@" in after.partition("?")[0] or not is_port


def expand_all(key: str, value: Any, missing: list[str] | None = None) -> Any:
    """The value, with the variables of all texts in it replaced as by `expand`.

    With `missing`, a text whose variable is not set stays as it is, and what `expand` says of it is added there.
    """
    if isinstance(value, str):
        try:
            return expand(key, value)
        except VariableMissingError as error:
            if missing is None:
                raise
            missing.append(str(error))
            return value
    if isinstance(value, dict):
        return {name: expand_all(f"{key}.{name}", item, missing) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_all(key, item, missing) for item in value]
    return value
