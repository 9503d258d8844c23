"""A drill runs the programs that fleet.toml names: with the extensions that the PostgreSQL of Cutline lacks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.restore.drill.drill import run_drill
from cutline.restore.drill.servers import DrillUnfitError
from cutline.restore.plan.request import RestoreRequest
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import NoSpark, execute
from tests.run.soak import first
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "weekly"
CONTENTS = """
CREATE SCHEMA ext; CREATE EXTENSION pgcrypto SCHEMA ext;
CREATE EXTENSION pg_stat_statements; CREATE EXTENSION postgres_fdw;
CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '127.0.0.1', port '1');
CREATE USER MAPPING FOR PUBLIC SERVER far OPTIONS (user 'a', password 'b');
CREATE FOREIGN TABLE remote (id int) SERVER far;
DROP EXTENSION plpgsql;
CREATE ROLE shop_owner; GRANT USAGE ON SCHEMA ext TO shop_owner; CREATE SCHEMA shop AUTHORIZATION shop_owner;
SET ROLE shop_owner;
CREATE TABLE shop.person (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), name text,
                          hashed bytea GENERATED ALWAYS AS (ext.digest(name, 'sha256')) STORED);
CREATE INDEX ON shop.person (ext.digest(name, 'md5'));
INSERT INTO shop.person (name) SELECT 'n' || n FROM generate_series(1, 100) AS n
"""
QUERIES = (
    "SELECT count(*) FROM shop.person WHERE hashed = ext.digest(name, 'sha256')",
    "SELECT current_setting('server_version_num')::int / 10000",
    "SELECT count(*) FROM pg_foreign_table",
    "SELECT count(*) FROM pg_extension WHERE extname = 'plpgsql'",
)


@pytest.mark.parametrize("major", first(MAJORS))
def test_the_servers_have_the_extensions_of_the_programs(tmp_path: Path, spark: SparkSession, major: int) -> None:
    server = require_server(major)
    with fleet_of(tmp_path / "fleet", [server]) as servers:
        execute(servers.primaries[0].dsn(), CONTENTS)
        runs = Runs(configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store"), Ready(spark))
        runs.init()
        runs.full(NAME)
    # Cutline's own PostgreSQL lacks one of the two.
    with pytest.raises(DrillUnfitError, match="lacks extensions that the snapshot has: pgcrypto") as raised:
        run_drill(runs.fleet, RestoreRequest(NAME), NoSpark(), Silent())
    assert "[drill] postgresql in fleet.toml" in raised.value.hint
    assert '[drill] extensions = ["postgres_fdw"] in fleet.toml' in raised.value.hint
    with runs.fleet.path.open("a") as file:
        file.write(f'\n[drill]\npostgresql = "{server.programs}"\nextensions = ["postgres_fdw"]\n')
        for query, expected in zip(QUERIES, (100, major, 1, 0), strict=True):
            file.write(f'[[drill.assertion]]\nnode = "s1"\nsql = "{query}"\nexpected = {expected}\n')
    report = run_drill(load_fleet(runs.fleet.path), RestoreRequest(NAME), runs.spark, Silent())
    assert [(one.holds, one.why) for one in report.assertions] == [(True, "")] * 4
