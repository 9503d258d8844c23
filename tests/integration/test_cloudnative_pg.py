"""What docs/kubernetes.md says for CloudNativePG: its parameters, its role and its statement are enough for a chain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import yaml
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from tests.commands.in_process import run_here
from tests.integration.documented_roles import await_standbys
from tests.run.quick_spark import with_spark
from tests.servers.fleets import fleet_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).parents[2] / "docs"
SECRET, CLUSTER = yaml.safe_load_all((DOCS / "kubernetes/cloudnative-pg/cluster.yaml").read_text())
(STATEMENT,) = re.findall(r"(?ms)^```sql cloudnative-pg\n(.*?)^```$", (DOCS / "kubernetes.md").read_text())
DATABASE, OWNER = (CLUSTER["spec"]["bootstrap"]["initdb"][key] for key in ("database", "owner"))
(ROLE,) = CLUSTER["spec"]["managed"]["roles"]
# A parameter of the operator's own, by which it is recognised.
PARAMETERS = CLUSTER["spec"]["postgresql"]["parameters"] | {"cnpg.config_sha256": "0a1b2c"}


def create_role(role: dict[str, Any]) -> sql.Composed:
    """The statement that the operator makes of a role, without its password."""
    options = [option for option in ("bypassrls", "login", "replication", "createdb", "superuser") if role.get(option)]
    groups = sql.SQL(", ").join(map(sql.Identifier, role["inRoles"]))
    words = sql.SQL(" ".join(options).upper())
    return sql.SQL("CREATE ROLE {} {} IN ROLE {}").format(sql.Identifier(role["name"]), words, groups)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[EmbeddedFleet]:
    """A primary and a standby with the parameters of the page, and the database with a table of its owner."""
    with fleet_of(tmp_path / "servers", [None], backups=1, schema=False, settings=PARAMETERS) as fleet:
        (primary,) = fleet.primaries
        with psycopg.connect(primary.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {OWNER} LOGIN")
            connection.execute(f"CREATE DATABASE {DATABASE} OWNER {OWNER}")
            connection.execute(create_role(ROLE))
        with psycopg.connect(make_conninfo(primary.dsn(DATABASE), user=OWNER), autocommit=True) as connection:
            connection.execute("CREATE TABLE paid (id int PRIMARY KEY, amount numeric)")
            connection.execute("INSERT INTO paid SELECT n, n FROM generate_series(1, 100) AS n")
        # A standby that has not replayed the role and the database yet would be left out.
        listed = load_fleet(fleet.fleet_toml)
        nodes = [replace(node, dsn=make_conninfo(node.dsn, dbname="postgres")) for node in listed.nodes]
        await_standbys(replace(listed, nodes=tuple(nodes)))
        yield fleet


def describe(servers: EmbeddedFleet, folder: Path) -> Fleet:
    """The fleet file, with a store in the folder, and the role in each dsn."""
    nodes = "".join(
        f'\n[[node]]\nid = "{node.id}"\ndsn = "{make_conninfo(node.dsn(DATABASE), user=ROLE["name"])}"\n'
        + (f'backup_of = "{node.backup_of}"\n' if node.backup_of else "")
        for node in servers.nodes
    )
    path = folder / "fleet.toml"
    path.write_text(f'name = "shop"\nstore = "file://{folder}/store"\n{nodes}{with_spark("")}\n')
    return load_fleet(path)


def test_the_cluster_of_the_page_is_enough_for_a_chain(
    servers: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    fleet = describe(servers, tmp_path)
    code, refused = run_here(fleet, "init")
    # The operator grants no privileges on functions.
    assert (code, refused["error"]) == (3, "node-unfit")
    assert STATEMENT.strip() in str(refused)

    with psycopg.connect(servers.primaries[0].dsn(DATABASE), autocommit=True) as connection:
        connection.execute(STATEMENT.encode())
    code, document = run_here(fleet, "init")
    assert code == 0, document
    assert [one["statement"] for one in document["grants"]] == ['GRANT "pg_signal_backend" TO "cutline";']
    assert [one["warning"] for one in document["surroundings"]] == ["cloudnative-pg"]
    assert run_here(fleet, "create", "week", spark=spark)[0] == 0
    with psycopg.connect(make_conninfo(servers.primaries[0].dsn(DATABASE), user=OWNER)) as connection:
        connection.execute("INSERT INTO paid VALUES (101, 0)")
    assert run_here(fleet, "create", "week", "--incremental", spark=spark)[0] == 0
    code, checked = run_here(fleet, "check", "week", spark=spark)
    assert (code, checked["result"]) == (0, "valid")


def test_the_limits_on_retained_wal_are_in_the_order_that_the_page_names(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('name = "x"\nstore = "/x"\n[[node]]\nid = "s1"\ndsn = "host=x dbname=x"\n')
    (node,) = load_fleet(tmp_path / "fleet.toml").nodes
    # PostgreSQL's GB is a GiB.
    kept = int(PARAMETERS["max_slot_wal_keep_size"].removesuffix("GB")) << 30
    volume = int(CLUSTER["spec"]["walStorage"]["size"].removesuffix("Gi")) << 30
    assert node.retained_wal_bytes_max < kept < volume


def test_the_role_reads_its_password_from_the_secret() -> None:
    assert SECRET["metadata"]["name"] == ROLE["passwordSecret"]["name"]
    assert SECRET["stringData"]["username"] == ROLE["name"]
    assert SECRET["metadata"]["namespace"] == CLUSTER["metadata"]["namespace"]
