"""The settings of the source's sessions, for the sessions of a restore in which the server computes values.

Our sessions pin the settings by which values are printed and read. But a materialized view, a generated column, an
index or a CHECK may depend on the settings of the session that computes it, and on the source that was an application's
session. So these sessions get the stored settings of the source's sessions (snapshots/ddl/database_facts.py), except
for those by which they read the texts of values: rows and DDL were printed under our settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from cutline.nodes.server_errors import shorten_message

# COPY reads values under these settings.
READING_ROWS = frozenset(("datestyle", "intervalstyle", "lc_monetary", "timezone_abbreviations", "xmloption"))
# Constants in DDL are read the same whatever DateStyle and IntervalStyle are, as pg_dump writes them.
READING_DDL = frozenset(("lc_monetary", "xmloption"))
# Names and values as bytes: a session may be raw (nodes.encodings).
SET_ONE = "pg_catalog.set_config(pg_catalog.convert_from(%s, 'UTF8'), pg_catalog.convert_from(%s, 'UTF8'), false)"


def settings_for_rows(settings: Mapping[str, str]) -> dict[str, str]:
    """Choose the settings for sessions that load rows."""
    return {name: value for name, value in settings.items() if name not in READING_ROWS}


def settings_for_ddl(settings: Mapping[str, str]) -> dict[str, str]:
    """Choose the settings for sessions that create indexes and constraints."""
    return {name: value for name, value in settings.items() if name not in READING_DDL}


def set_settings(connection: psycopg.Connection[Any], settings: Mapping[str, str]) -> dict[str, str]:
    """Set the settings in the session, outside a transaction; return why the server refused some of them, by name.

    A server may not know a value, such as a locale, and our role may lack the privilege.
    """
    try:
        _set(connection, settings)
    except psycopg.Error:
        if connection.broken:
            raise
    else:
        return {}
    refused: dict[str, str] = {}
    for name, value in settings.items():
        try:
            _set(connection, {name: value})
        except psycopg.Error as error:
            if connection.broken:
                raise
            refused[name] = shorten_message(error)
    return refused


def _set(connection: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    if settings:
        texts = [text.encode() for setting in settings.items() for text in setting]
        connection.execute(f"SELECT {', '.join([SET_ONE] * len(settings))}".encode(), texts)
