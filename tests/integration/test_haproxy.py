"""HAProxy between a command and its nodes: it passes everything on, and ends sessions that are silent for too long."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import NodeUnreachableError, connect, raising_unreachable
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.poolers.haproxy import haproxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "proxied", "proxied_again"


def test_a_chain_is_taken_checked_and_restored_through_it(
    shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession
) -> None:
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet:
        (node,) = fleet.primaries
        execute(node.dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        with haproxy(tmp_path / "haproxy", node.dsn, "1d") as proxy:
            through = replace(fleet, nodes=(replace(node, dsn=proxy.dsn(node.dsn)),))
            target = replace(through, nodes=(replace(node, dsn=make_conninfo(through.nodes[0].dsn, dbname=TARGET)),))
            with dropping_slots(through):
                runs = Runs(through, Ready(spark))
                runs.init()
                runs.full("one")
                execute(node.dsn, "UPDATE t SET v = 'c' WHERE id = 1", "DELETE FROM t WHERE id = 2")
                runs.increment("one")
                assert runs.check_one("one").conflicts == []
                runs.restore("one", target)
        assert sorted_copies(make_conninfo(node.dsn, dbname=TARGET)) == sorted_copies(node.dsn)


def test_a_session_that_it_has_ended_is_told_as_that(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet:
        (node,) = fleet.primaries
        with haproxy(tmp_path / "haproxy", node.dsn, "500ms") as proxy:
            through = replace(node, dsn=proxy.dsn(node.dsn))
            with connect(through) as session:
                time.sleep(1)
                with (
                    pytest.raises(NodeUnreachableError, match="server closed the connection unexpectedly") as raised,
                    raising_unreachable(through),
                ):
                    session.execute("SELECT 1")
    assert "`timeout client`" in raised.value.hint
