"""Money is a number without its currency: what a locale makes of it on the way must be the same in both directions.

Yen have no decimals and euros a comma: read with another locale than it was written with, a value is another one. The
locales are compiled here, of the sources that glibc comes with; a machine without them skips the test.
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

from fleet.nodes.connections import with_database
from fleet.programs.wheel_copy import shared_temporary_directory
from tests.integration.refusing import execute
from tests.snapshot_runs import Ready, Runs, described, sorted_copies
from tests.soak import SOAK_SECONDS

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
    """Compiled locales that servers find which are started while the test runs."""
    # Not pytest's folder: the server's account could not read it.
    folder = Path(tempfile.mkdtemp(prefix="cutline-locales-", dir=shared_temporary_directory()))
    try:
        folder.chmod(0o755)
        for name in LOCALES:
            command = ["localedef", "-i", name, "-f", "UTF-8", "--no-archive", str(folder / f"{name}.UTF-8")]
            # It warns by 1 of what it does not need.
            if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode > 1:
                pytest.skip("glibc's sources of locales are not installed")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        monkeypatch.setenv("LOCPATH", str(folder))
        yield
    finally:
        shutil.rmtree(folder)


@pytest.mark.usefixtures("locales")
def test_money_is_the_same_whatever_its_currency(
    fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    embedded = fleet_factory(shards=2, schema=False)
    source, other = (node.dsn("postgres") for node in embedded.primaries)
    execute(source, "ALTER ROLE postgres SET lc_monetary = 'de_DE.UTF-8'", "CREATE DATABASE bank")
    # The target's sessions begin with yen: euros would come back a hundred times as much, or not at all.
    execute(other, "ALTER ROLE postgres SET lc_monetary = 'ja_JP.UTF-8'")
    fleet = described(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
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
    # Of the last state, in short, which has the first one's values too.
    for increment, state in enumerate(states) if SOAK_SECONDS else [(1, states[1])]:
        runs.restore(NAME, target, increment)
        assert state_of(there.dsn) == state


def state_of(dsn: str) -> tuple[object, ...]:
    """The rows, defaults and bounds as one reader sees them."""
    reader = psycopg.conninfo.make_conninfo(dsn, options="-c lc_monetary=C")
    with psycopg.connect(reader) as connection:
        return sorted_copies(reader), connection.execute(DEFAULTS_QUERY.encode()).fetchall()
