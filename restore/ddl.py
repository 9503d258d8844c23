"""Running a shard's stored DDL, and setting its sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import psycopg

from fleet.config import Node
from fleet.connections import connect
from snapshots.manifest import Sequence
from storage.errors import RefusedError

# pg_dump writes a foreign key as one statement of two lines, on partitioned tables without ONLY; every identifier
# is quoted.
FOREIGN_KEY = re.compile(
    r'^ALTER TABLE (?:ONLY )?(?P<table>\S.*)\n    ADD CONSTRAINT (?P<name>".*?") FOREIGN KEY .*?;$', re.MULTILINE
)
BUILD_SETTINGS = {"maintenance_work_mem": "256MB", "synchronous_commit": "off"}


class SchemaLoadError(RefusedError):
    """A target node did not take the snapshot's DDL."""


def run_section(node: Node, section: str, script: str) -> None:
    """Run one section's SQL as a whole; raise SchemaLoadError with the statement's own error."""
    try:
        # pg_dump's script sets what it needs; ours would get in the way of functions it checks.
        with connect(node) as connection:
            for name, value in BUILD_SETTINGS.items():
                connection.execute(f"SET {name} = '{value}'")
            result = connection.pgconn.exec_(script.encode())
            if result.error_message:
                raise _refused(node, section, result.error_message.decode(errors="replace"))
    except psycopg.OperationalError as error:
        raise _refused(node, section, str(error)) from error


def _refused(node: Node, section: str, message: str) -> SchemaLoadError:
    return SchemaLoadError(
        f"node {node.id}: the {section} DDL was refused: {' '.join(message.split())}",
        hint="make on the target what it names (an extension, a tablespace, a role), then repeat",
        details={"node": node.id, "section": section},
    )


def without_foreign_keys(script: str) -> tuple[str, list[str]]:
    """The post-data script without its foreign keys, and their names: a part of the tables may not satisfy them."""
    names = [f"{match['name']} of {match['table']}" for match in FOREIGN_KEY.finditer(script)]
    return FOREIGN_KEY.sub("", script), names


def set_sequences(connection: psycopg.Connection[Any], sequences: Iterable[Sequence]) -> None:
    """Set every sequence that was used to its value."""
    for sequence in sequences:
        if sequence.last_value is not None:
            connection.execute(
                "SELECT setval(format('%%I.%%I', %s::text, %s::text)::regclass, %s, true)",
                (sequence.schema, sequence.name, sequence.last_value),
            )
