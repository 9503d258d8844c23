"""The command in the hint of a drill that ends because DDL was refused can be typed as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "hinted"
IDENTIFIER_QUERY = "SELECT system_identifier FROM pg_control_system()"


def test_the_command_that_drills_without_refused_ddl_has_the_options_that_were_given(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with own_database(shared_fleet, tmp_path, "hinted") as fleet:
        (node,) = fleet.nodes
        with psycopg.connect(node.dsn) as connection:
            (identifier,) = connection.execute(IDENTIFIER_QUERY).fetchone() or (0,)
        execute(
            node.dsn,
            "CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)",
            "CREATE FUNCTION at_home(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN"
            f"  IF ({IDENTIFIER_QUERY}) <> {identifier} THEN RAISE 'away'; END IF; RETURN 1; END $$",
            "CREATE INDEX item_home ON item (at_home(id))",
        )
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        code, document = run_here(fleet, "drill", NAME, "--increment", "0", spark=spark)
        assert (code, document["error"]) == (10, "ddl-refused"), document
        (line,) = (line for line in document["hint"].splitlines() if line.startswith("to drill without them: "))
        command, same_target = line.removeprefix("to drill without them: ").split("   ")
        words = shlex.split(command)
        words = words[words.index("drill") :]
        assert words == ["drill", NAME, "--increment", "0", "--allow-refused-ddl"]
        assert same_target == "with the same --to FILE, if it had one"
        code, document = run_here(fleet, *words, spark=spark)
        assert (code, document["result"]) == (4, "inconclusive"), document
