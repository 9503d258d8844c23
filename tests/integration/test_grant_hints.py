"""The grants that hints print: pasted as they stand, they let the role read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.nodes.privileges import DEFAULT_PRIVILEGES_VERSION, OIDS_AT_ONCE, find_large_object_problems
from cutline.snapshots.create.sequences import SequenceUnreadableError, read_sequences
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

ROLE = 'it\'s "100%" a reader'
QUOTED = ROLE.replace('"', '""')


@pytest.fixture
def nodes(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """A database's node as its owner connects, and as a role does that may read nothing."""
    with own_database(shared_fleet, tmp_path, "granted") as fleet:
        (node,) = fleet.nodes
        execute(node.dsn, f'CREATE ROLE "{QUOTED}" LOGIN')
        try:
            yield node, replace(node, dsn=make_conninfo(node.dsn, user=ROLE))
        finally:
            execute(node.dsn, f'DROP OWNED BY "{QUOTED}"', f'DROP ROLE "{QUOTED}"')


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("which", [0, 1])
def test_a_grant_for_sequences_can_be_pasted(nodes: tuple[Node, Node], count: int, which: int) -> None:
    admin, reader = nodes
    # The role may read one of them, but not use its schema.
    execute(admin.dsn, 'CREATE SCHEMA "A.b"', *(f'CREATE SEQUENCE "A.b"."s""{i}"' for i in range(count)))
    execute(admin.dsn, f'GRANT SELECT ON SEQUENCE "A.b"."s""0" TO "{QUOTED}"')
    with psycopg.connect(reader.dsn, autocommit=True) as connection:
        with pytest.raises(SequenceUnreadableError) as refused:
            read_sequences(reader, connection, 1, print)
        assert refused.value.message.count("A.b.s") == min(count, 5)
        execute(admin.dsn, *refused.value.hint.split("   or: ")[which].split("; "))
        assert len(read_sequences(reader, connection, 1, print).sequences) == count


@pytest.mark.parametrize("count", [3, OIDS_AT_ONCE + 1])
def test_a_grant_for_large_objects_can_be_run(nodes: tuple[Node, Node], count: int) -> None:
    admin, reader = nodes
    execute(admin.dsn, f"SELECT lo_create(0) FROM generate_series(1, {count})")
    with psycopg.connect(reader.dsn, autocommit=True) as connection:
        found = [problem.remedy for problem in find_large_object_problems(reader, connection)]
        assert [statement for statement in found if statement.startswith("DO ")] == found[-1:] * (count > OIDS_AT_ONCE)
        execute(admin.dsn, *found)
        assert list(find_large_object_problems(reader, connection)) == []
        # From version 18 on, also those that are created later.
        execute(admin.dsn, "SELECT lo_create(0)")
        is_readable = connection.info.server_version >= DEFAULT_PRIVILEGES_VERSION
        assert list(find_large_object_problems(reader, connection)) == [] or not is_readable
