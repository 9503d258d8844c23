"""The same through pgBackRest itself, with the options that docs/physical-backups.md gives it; skipped without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.server import EmbeddedNode, delete_server, start_server
from cutline.fleet.progress import Silent
from cutline.nodes.programs import run_as
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.create.restore_point import create_restore_point
from cutline.snapshots.listing.listing import show_snapshot
from cutline.snapshots.listing.recovery_plan import NodeRecovery, plan_recovery
from tests.integration.recovering.physical_place import (
    RECOVERING,
    PhysicalPlace,
    await_promoted,
    physical_place,
    run_all,
)
from tests.programs.lacking import lacking
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PGBACKREST = shutil.which("pgbackrest")
pytestmark = pytest.mark.skipif(PGBACKREST is None, reason=lacking("pgbackrest", "it is not on the PATH"))
SECONDS_MAX = 300
# The first pgBackRest that knows PostgreSQL 18. Debian 12 has an older one.
KNOWS_18 = (2, 57)


@pytest.fixture
def known(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[PhysicalPlace]:
    """Servers that this pgBackRest knows."""
    told = subprocess.run([str(PGBACKREST), "version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(one) for one in re.findall(r"\d+", told)[:2])
    both = None if version >= KNOWS_18 else require_server(15)
    with physical_place(tmp_path_factory.mktemp("pgbackrest"), spark, both) as place:
        yield place


def configure(place: PhysicalPlace, node: EmbeddedNode) -> None:
    """Write the configuration file of a node: a repository beside its data."""
    home = node.folder / "pgbackrest"
    home.mkdir()
    lines = [
        "[global]", f"repo1-path={home}/repository", "repo1-retention-full=1", f"lock-path={home}/lock",
        f"spool-path={home}/spool", "log-level-file=off", "log-level-console=warn", f"[{node.id}]",
        f"pg1-path={node.data_directory}", f"pg1-socket-path={node.folder}", "pg1-user=postgres",
    ]  # fmt: skip
    (home / "pgbackrest.conf").write_text("\n".join(lines) + "\n")
    if (account := place.programs(node).account) is not None:
        os.chown(home, account.uid, account.gid)


def words_of(source: EmbeddedNode, *words: str) -> list[str]:
    """The command line of pgBackRest for the repository of `source`."""
    return [str(PGBACKREST), f"--config={source.folder}/pgbackrest/pgbackrest.conf", f"--stanza={source.id}", *words]


def run(place: PhysicalPlace, source: EmbeddedNode, *words: str) -> None:
    done = run_as(place.programs(source).account, words_of(source, *words), seconds_max=SECONDS_MAX)
    assert done.returncode == 0, (done.stdout, done.stderr)


def back_up(place: PhysicalPlace, node: EmbeddedNode) -> None:
    configure(place, node)
    run(place, node, "stanza-create")
    push = " ".join(words_of(node, "archive-push", '"%p"'))
    run_all(node, [f"ALTER SYSTEM SET archive_command = '{push}'", "SELECT pg_reload_conf()"])
    run(place, node, "backup", "--type=full", "--start-fast")


def recover(place: PhysicalPlace, plan: NodeRecovery) -> EmbeddedNode:
    source = place.servers.node(plan.node)
    node = place.new_node(source)
    target = [f"--target={plan.target}", "--target-exclusive", f"--target-timeline={plan.timeline}"]
    into = f"--pg1-path={node.data_directory}"
    run(place, source, "restore", into, "--type=lsn", *target, "--target-action=promote")
    with (node.data_directory / "postgresql.auto.conf").open("a") as file:
        file.writelines(f"{line}\n" for line in RECOVERING)
    start_server(place.programs(source), node)
    await_promoted(node)
    run_all(node, plan.statements)
    return node


def test_backups_of_pgbackrest_are_recovered_to_a_restore_point(known: PhysicalPlace) -> None:
    initialise(known.fleet, Silent())
    with BankWorkload(known.servers.dsns(), clients=3, pause_seconds=0.01) as workload:
        for node in known.servers.primaries:
            back_up(known, node)
        create_restore_point(known.fleet, CreateRequest("by-pgbackrest"), Silent())
        # What a recovery beyond the point would find.
        assert workload.wait(1)
    for node in known.servers.primaries:
        run(known, node, "check")
    nodes = [recover(known, one) for one in plan_recovery(show_snapshot(known.fleet, "by-pgbackrest").chain)]
    try:
        invariants = read_invariants([node.dsn() for node in nodes])
        assert invariants.hold, invariants
        now = read_invariants([node.dsn() for node in known.servers.primaries]).transfers
        assert all(then < later for then, later in zip(invariants.transfers, now, strict=True)), (invariants, now)
        for node in nodes:
            with psycopg.connect(node.dsn()) as connection:
                assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
    finally:
        for node in nodes:
            delete_server(node)
