"""A session in an exported snapshot: what it sees, and the error once the snapshot no longer exists."""

from __future__ import annotations

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from cutline.nodes.connections import NodeUnreachableError, connect
from cutline.snapshots.base_copy.copy_slots import open_exported


def test_a_session_sees_its_exported_snapshot_while_another_session_holds_that(shared_fleet: EmbeddedFleet) -> None:
    node = load_fleet(shared_fleet.fleet_toml).primaries[0]
    with connect(node) as writer:
        with connect(node) as holder:
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            (exported,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
            later = writer.execute("SELECT pg_current_xact_id()").fetchone()
            with open_exported(node, exported) as session:
                shows = "SELECT pg_visible_in_snapshot(%s, pg_current_snapshot())"
                assert session.execute(shows, later).fetchone() == (False,)
            with pytest.raises(NodeUnreachableError, match="read-only"), open_exported(node, exported) as session:
                session.execute("CREATE TABLE public.never (id int)")
        gone = pytest.raises(NodeUnreachableError, match=f"node {node.id}: .*snapshot")
        with gone, open_exported(node, exported):
            pytest.fail("a session could use a snapshot that no longer exists")
