"""Poolers that have a database under another name: a chain goes on through them, under the server's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import SUPERUSER
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError, connect
from cutline.nodes.problems import addresses_of, find_role_problems, quote, script_of
from cutline.nodes.programs import run_tool
from cutline.nodes.read_only import resume_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.target import TargetUnfitError
from cutline.snapshots.create.initialise import initialise
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.faults.pg_proxy import pg_proxies, route_through

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ALIAS, DATABASE = "till", "bank"
NAME = "aliased"


@pytest.fixture(scope="module")
def both(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Runs, Runs]]:
    """The commands on a fleet with one store, directly and through poolers with an alias."""
    folder = tmp_path_factory.mktemp("aliases")
    direct = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store")
    with pg_proxies(shared_fleet) as proxies, dropping_slots(direct):
        for proxy in proxies.values():
            proxy.alias = (ALIAS, DATABASE)
        aliased = route_through(proxies, direct, folder / "aliased.toml")
        assert all(node.dsn.endswith(f"/{ALIAS}") for node in aliased.nodes)
        yield Runs(direct, Ready(spark)), Runs(aliased, Ready(spark))


def test_a_chain_goes_on_with_and_without_an_alias(both: tuple[Runs, Runs]) -> None:
    direct, aliased = both
    aliased.init()
    full = aliased.full(NAME)
    assert {facts.name for facts in full.databases.values()} == {DATABASE}
    assert {identity.database for identity in full.baseline} == {DATABASE}
    for runs in (direct, aliased):
        assert {facts.name for facts in runs.increment(NAME).databases.values()} == {DATABASE}
    assert [aliased.check_one(NAME, number).result for number in range(3)] == ["valid"] * 3


def test_what_is_to_be_set_for_the_server_has_the_name_there(both: tuple[Runs, Runs]) -> None:
    direct, aliased = both
    with psycopg.connect(direct.fleet.nodes[0].dsn, application_name="Patroni heartbeat"):
        code, document = run_here(aliased.fleet, "init")
    (found,) = [one for one in document["surroundings"] if one["warning"] == "patroni"]
    assert (code, f"database: {DATABASE}}}]" in found["action"]) == (0, True), found


def test_the_script_that_init_suggests_connects_by_the_name_that_the_pooler_has(both: tuple[Runs, Runs]) -> None:
    direct, aliased = both
    node = direct.fleet.nodes[0]
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE limited LOGIN")
        try:
            listed = replace(aliased.fleet.nodes[0], dsn=make_conninfo(aliased.fleet.nodes[0].dsn, user="limited"))
            with connect(listed) as limited:
                problems = list(find_role_problems(listed, limited))
        finally:
            connection.execute("DROP ROLE limited")
    script = script_of(problems, addresses_of([listed]))
    (line,) = [line for line in script if line.startswith("\\connect")]
    target = line.partition('"')[2].rstrip('"')
    with psycopg.connect(target, user=SUPERUSER) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == (DATABASE,)
    assert f"dbname={ALIAS}" in target


def test_the_script_for_a_role_that_does_not_exist_grants_on_the_database_that_the_server_has(
    both: tuple[Runs, Runs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, aliased = both
    role = 'it\'s "absent"'
    first, *others = aliased.fleet.nodes
    listed = replace(aliased.fleet, nodes=(replace(first, dsn=make_conninfo(first.dsn, user=role)), *others))
    with pytest.raises(NodeUnreachableError) as refused:
        initialise(listed, Silent())
    script = tmp_path / "script.sql"
    script.write_text(refused.value.hint.partition("\n")[2])
    monkeypatch.setenv("PGUSER", SUPERUSER)
    dsn = direct.fleet.nodes[0].dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        try:
            run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={script}", dsn)
            granted = (
                "SELECT FROM pg_database, aclexplode(datacl) WHERE datname = %s AND grantee::regrole = %s::regrole"
            )
            assert connection.execute(granted, (DATABASE, quote(role))).fetchall() == [()]
        finally:
            connection.execute(f"DROP OWNED BY {quote(role)}; DROP ROLE {quote(role)}".encode())


@pytest.mark.parametrize("scope", [RestoreScope(), RestoreScope(data_only=True)], ids=["databases", "rows"])
def test_a_restore_into_an_alias_is_refused(both: tuple[Runs, Runs], scope: RestoreScope) -> None:
    """It would create a database of the alias's name, and the pooler's clients would still see the other one."""
    direct, aliased = both
    direct.init()
    name = f"refused-{scope.data_only}"
    direct.full(name)
    before = databases(direct)
    with pytest.raises(TargetUnfitError, match=f"database {ALIAS}, but sessions come to database {DATABASE}") as raised:
        aliased.restore(name, aliased.fleet, scope=scope)
    assert raised.value.exit_code == 3
    assert "dbname" in raised.value.hint
    assert databases(direct) == before


def databases(runs: Runs) -> list[str]:
    with psycopg.connect(runs.fleet.nodes[0].dsn) as connection:
        return [row[0] for row in connection.execute("SELECT datname FROM pg_database ORDER BY 1")]


def test_a_terminal_snapshot_freezes_the_database_itself(both: tuple[Runs, Runs]) -> None:
    direct, aliased = both
    direct.init()
    aliased.full("last", terminal=True)
    report = resume_fleet(direct.fleet, Silent())
    assert report
    assert direct.check_one("last").result == "valid"
