"""Values of type money are stored without a currency, so Cutline must write and read their text in the same locale.

Yen have no decimals, and euros have a decimal comma: text that is read in another locale becomes another value. The
test compiles the locales from glibc's sources; a machine without those skips the test.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.nodes.connections import with_database
from cutline.nodes.programs import shared_temporary_directory
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, sorted_copies
from tests.integration.refusing import execute
from tests.run.soak import SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.conftest import FleetFactory

NAME = "money"
LOCALES = ("de_DE", "ja_JP")
SCHEMA = (
    "CREATE TABLE paid (amount money PRIMARY KEY, v money DEFAULT '1.234,56 €', many money[], n int)",
    "CREATE TABLE by_price (price money, n int, PRIMARY KEY (price)) PARTITION BY RANGE (price)",
    "CREATE TABLE cheap PARTITION OF by_price FOR VALUES FROM (MINVALUE) TO ('1.000,50')",
    "CREATE TABLE dear PARTITION OF by_price FOR VALUES FROM ('1.000,50') TO (MAXVALUE)",
    "INSERT INTO paid VALUES ('-92.233.720.368.547.758,08', '0,01', '{\"1,50\",NULL}'), ('12,34', '-0,01', NULL),"
    " ('56,78', DEFAULT, NULL)",
    "INSERT INTO by_price VALUES ('1.000,49', 1), ('1.000,50', 2), ('0,07', 3)",
)
CHANGES = (
    "UPDATE paid SET v = '99.999,99', amount = '12,35' WHERE amount = '12,34'",
    "ALTER TABLE paid ADD added money DEFAULT '7.654,32'",
    "DELETE FROM paid WHERE amount = '56,78'",
    "UPDATE by_price SET price = '1.000.000,01' WHERE n = 3",
)
DEFAULTS_QUERY = """
SELECT adrelid::regclass::text, pg_get_expr(adbin, adrelid) FROM pg_attrdef
UNION ALL SELECT oid::regclass::text, pg_get_expr(relpartbound, oid) FROM pg_class WHERE relispartition
 ORDER BY 1, 2
"""


@pytest.fixture
def locales(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the locales, for servers that are started during the test."""
    # Not in pytest's folder, which the servers' account can't read.
    folder = Path(tempfile.mkdtemp(prefix="cutline-locales-", dir=shared_temporary_directory()))
    try:
        folder.chmod(0o755)
        for name in LOCALES:
            command = ["localedef", "-i", name, "-f", "UTF-8", "--no-archive", str(folder / f"{name}.UTF-8")]
            # Exit code 1 is only a warning.
            if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode > 1:
                pytest.skip("glibc's sources of locales are not installed")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        monkeypatch.setenv("LOCPATH", str(folder))
        yield
    finally:
        shutil.rmtree(folder)


@pytest.mark.usefixtures("locales")
def test_money_is_restored_unchanged_on_a_server_with_another_currency(
    fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    embedded = fleet_factory(shards=2, schema=False)
    source, other = (node.dsn("postgres") for node in embedded.primaries)
    execute(source, "ALTER ROLE postgres SET lc_monetary = 'de_DE.UTF-8'", "CREATE DATABASE bank")
    # Sessions on the target default to yen: amounts in euros would be read as a hundred times as much, or rejected.
    execute(other, "ALTER ROLE postgres SET lc_monetary = 'ja_JP.UTF-8'")
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    there = with_database(fleet.primaries[1], "back")
    fleet = replace(fleet, nodes=fleet.nodes[:1])
    target = replace(fleet, nodes=(replace(fleet.nodes[0], dsn=there.dsn),))
    runs = Runs(fleet, Ready(spark))
    execute(fleet.nodes[0].dsn, *SCHEMA)
    runs.init()
    runs.full(NAME)
    states = [state_of(fleet.nodes[0].dsn)]
    execute(fleet.nodes[0].dsn, *CHANGES)
    runs.increment(NAME)
    states.append(state_of(fleet.nodes[0].dsn))
    # The short form restores only the last state, which includes the values of the first.
    for increment, state in enumerate(states) if SOAK_SECONDS else [(1, states[1])]:
        runs.restore(NAME, target, increment)
        assert state_of(there.dsn) == state


def state_of(dsn: str) -> tuple[object, ...]:
    """The rows, defaults and partition bounds, read in the same locale on every server."""
    reader = psycopg.conninfo.make_conninfo(dsn, options="-c lc_monetary=C")
    with psycopg.connect(reader) as connection:
        return sorted_copies(reader), connection.execute(DEFAULTS_QUERY.encode()).fetchall()
