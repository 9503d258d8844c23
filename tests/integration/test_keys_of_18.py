"""Foreign keys as only 18 has them: those NOT ENFORCED are not verified after a load, those with PERIOD are named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.restore.rows.references import find_temporal
from tests.integration.own_shard import database_on
from tests.integration.referred import parents_on, verify

pytestmark = pytest.mark.postgresql(18, reason="NOT ENFORCED foreign keys and those with PERIOD came with 18")


@pytest.fixture
def node(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with database_on(shared_fleet, "referring", tmp_path_factory.mktemp("referring")) as fleet:
        yield fleet.primaries[0]


def test_a_key_that_is_not_enforced_promises_nothing(node: Node) -> None:
    with parents_on(node) as session:
        session.execute("CREATE TABLE child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent NOT ENFORCED)")
        verify(node, session, "child")
        session.execute("INSERT INTO child VALUES (1, 'y')")
        verify(node, session, "child")


def test_keys_of_periods_are_named(node: Node) -> None:
    with parents_on(node) as session:
        session.execute("CREATE EXTENSION btree_gist")
        session.execute("CREATE TABLE lease (id int, at daterange, PRIMARY KEY (id, at WITHOUT OVERLAPS))")
        session.execute(
            "CREATE TABLE child (id int, at daterange, FOREIGN KEY (id, PERIOD at) REFERENCES lease (id, PERIOD at))"
        )
        (oid,) = session.execute("SELECT 'child'::regclass::oid::bigint").fetchone() or (0,)
        assert find_temporal(session, [oid]) == ["child_id_at_fkey of public.child"]
