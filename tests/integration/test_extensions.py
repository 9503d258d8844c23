"""Extensions that fleets have: their types, tables and workers before, during and after snapshots; and in drills."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.drill.drill import run_drill
from cutline.restore.drill.servers import DrillUnfitError
from cutline.restore.plan.request import RestoreRequest
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.fuzz.state import state_of
from tests.integration.refusing import NoSpark, execute
from tests.run.soak import first
from tests.servers.extensions import OF_DEBIAN, PGVECTOR, environment
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, MORE_FOLDERS, Server, ask, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, BACK, SECONDS_MAX = "extended", "bank_back", 60
# dblink, as the server finds libpq for it, and pg_cron then has it, too.
CRON = {
    "shared_preload_libraries": "dblink,pg_cron",
    "cron.database_name": "bank",
    "cron.use_background_workers": "on",
    "max_worker_processes": "20",
    # From 15.19 on a server has a list of them.
    "output_plugin_libraries": "pgoutput, wal2json",
}
CONTENTS = """
CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman;
CREATE EXTENSION pg_cron; CREATE EXTENSION pg_repack; CREATE EXTENSION hll; CREATE EXTENSION ip4r;
CREATE TABLE visit (id int PRIMARY KEY, who hll NOT NULL DEFAULT hll_empty(11, 5), net ip4r, at ipaddress);
INSERT INTO visit SELECT n, hll_add(hll_empty(11, 5), hll_hash_integer(n)), ('10.0.' || n || '.0/24')::ip4r,
       ('2001:db8::' || n)::ipaddress FROM generate_series(1, 200) AS n;
CREATE INDEX ON visit USING gist (net);
CREATE TABLE event (id bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL, what text, PRIMARY KEY (id, at))
       PARTITION BY RANGE (at);
SELECT partman.create_parent('public.event', 'at', 'native', 'daily', p_premake := 2);
ALTER TABLE partman.template_public_event REPLICA IDENTITY FULL;
INSERT INTO event (at, what) SELECT now() + n % 3 * interval '1 day', 'e' || n FROM generate_series(1, 90) AS n;
CREATE TABLE fat (id int PRIMARY KEY, v text);
INSERT INTO fat SELECT n, repeat('x', 100) FROM generate_series(1, 2000) AS n;
CREATE TABLE beat (id serial PRIMARY KEY, at timestamptz);
SELECT cron.schedule('beat', '0 0 1 1 *', 'INSERT INTO beat DEFAULT VALUES')
"""
JOB = "beat|0 0 1 1 *|INSERT INTO beat DEFAULT VALUES"
SLOT = "SELECT slot_name FROM pg_create_logical_replication_slot('theirs', 'wal2json')"
CHANGES = """
UPDATE visit SET who = hll_add(who, hll_hash_integer(7)), net = '10.9.0.0/16' WHERE id <= 50;
DELETE FROM visit WHERE id > 150;
UPDATE fat SET v = 'changed' WHERE id % 3 = 0;
UPDATE partman.part_config SET premake = 4;
"""
# pg_cron is not restored into a database of another name, so neither are its jobs.
OF_CRON = frozenset({"cron.job", "cron.job_run_details"})
# The extension's own procedure commits.
MAINTENANCE = "CALL partman.run_maintenance_proc()"
PARTITIONS = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'event'::regclass"
WORKING = "SELECT count(*) FROM pg_class WHERE relnamespace = 'repack'::regnamespace AND relkind = 'r'"


def ask_one(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as connection:
        ((value,),) = connection.execute(query.encode()).fetchall()
    return value


def assert_back(source: str, restored: str, *, lacking: frozenset[str] = frozenset()) -> None:
    """Every table of the source but those `lacking`, and the DDL without pg_cron, are in the restored database."""
    expected, found = state_of(source), state_of(restored)
    for table, rows in expected.rows.items():
        if table not in lacking:
            assert found.rows[table] == rows, table
    assert without_cron(found.ddl) == without_cron(expected.ddl)


def without_cron(ddl: str) -> list[str]:
    return [line for line in ddl.splitlines() if "pg_cron" not in line and line.strip(" -")]


def repack(embedded: EmbeddedFleet, programs: Path) -> subprocess.Popen[str]:
    (node,) = embedded.primaries
    where = ["-h", str(node.folder), "-U", "postgres", "-d", "bank", "-t", "fat", "--wait-timeout=300"]
    return subprocess.Popen(
        [programs / "pg_repack", *where], env=environment(programs), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_extensions_of_fleets_come_back_and_no_job_of_a_restored_database_runs(
    tmp_path: Path, spark: SparkSession
) -> None:
    programs = OF_DEBIAN.programs()
    server = Server("15", programs, frozenset(), frozenset())
    with fleet_of(tmp_path / "fleet", [server], settings=CRON) as servers:
        (node,) = servers.primaries
        execute(node.dsn(), CONTENTS, SLOT)
        rules = '[groups]\nexclude = ["repack.*"]\n'
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=rules)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        execute(node.dsn(), CHANGES, MAINTENANCE)
        partitions = ask_one(node.dsn(), PARTITIONS)
        increment_during_repack(runs, servers, programs)
        assert ask_one(node.dsn(), PARTITIONS) == partitions
        # A table that pg_repack has rewritten is no new table.
        execute(node.dsn(), "UPDATE fat SET v = v || '!' WHERE id <= 100")
        commit = runs.increment(NAME)
        changes = commit.definition_changes
        assert changes is None or not changes.groups, changes
        assert '"action":"U"' in theirs(node.dsn())
        refused_then_without(runs, node.dsn())


def increment_during_repack(runs: Runs, servers: EmbeddedFleet, programs: Path) -> None:
    """Take an increment while pg_repack has its trigger and its tables, and waits for an older transaction.

    Without the rule that excludes its tables, which have no key, the increment would be refused.
    """
    (node,) = servers.primaries
    with psycopg.connect(node.dsn()) as older:
        older.execute("LOCK TABLE visit IN ACCESS SHARE MODE")
        running = repack(servers, programs)
        try:
            until(lambda: running.poll() is not None or ask_one(node.dsn(), WORKING) == 2)
            execute(node.dsn(), "UPDATE fat SET v = 'meanwhile' WHERE id <= 10")
            runs.increment(NAME)
            older.commit()
            output, _ = running.communicate(timeout=SECONDS_MAX)
        finally:
            running.kill()
    assert running.returncode == 0, output


def refused_then_without(runs: Runs, source: str) -> None:
    """pg_cron can be created in one database alone: that is said before any row is loaded, and restored without."""
    (node,) = runs.fleet.nodes
    there = replace(runs.fleet, nodes=(with_database(node, BACK),))
    with pytest.raises(
        SchemaLoadError, match="EXTENSION pg_cron: can only create extension in database bank"
    ) as raised:
        runs.restore(NAME, there)
    assert "such as pg_cron" in raised.value.hint
    report = runs.restore(NAME, there, allow_refused_ddl=True)
    assert [one.object for one in report.refused] == [
        "EXTENSION pg_cron", 'COMMENT EXTENSION "pg_cron"', "TABLE DATA cron.job",
        "SEQUENCE SET cron.jobid_seq", "SEQUENCE SET cron.runid_seq",
    ]  # fmt: skip
    assert_back(source, node.dsn.replace("/bank", f"/{BACK}"), lacking=OF_CRON)
    # A restored database has no jobs, also once it has the extension.
    report = runs.restore(NAME, runs.fleet, allow_refused_ddl=True)
    statement = next(one.statement for one in report.refused if one.object == "EXTENSION pg_cron")
    until(lambda: ask_one(source, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pg_cron'") == 0)
    execute(source, statement)
    assert ask_one(source, "SELECT count(*) FROM cron.job") == 0
    assert ask_one(source, "SELECT count(*) FROM beat") == 0
    # Its jobs are among the statements that the snapshot shows.
    code, document = run_here(runs.fleet, "show", NAME, "--statements")
    assert code == 0
    (node,) = document["statements"]
    execute(source, *(one for one in node["extension_rows"] if "cron" in one))
    assert ask_one(source, "SELECT string_agg(concat_ws('|', jobname, schedule, command), ',') FROM cron.job") == JOB
    # The next one has another number.
    execute(source, "SELECT cron.schedule('next', '0 0 1 1 *', 'SELECT 1')")
    a_drill_says_what_it_lacks(runs)


def a_drill_says_what_it_lacks(runs: Runs) -> None:
    """Cutline's own PostgreSQL has none of them: a drill is refused, or shows what does not need them."""
    with pytest.raises(DrillUnfitError, match="lacks extensions that the snapshot has: hll") as raised:
        run_drill(runs.fleet, RestoreRequest(NAME), NoSpark(), Silent())
    assert "--allow-refused-ddl" in raised.value.hint
    assert raised.value.message.endswith(
        "a drill can't create extensions that a server allows in only one database: pg_cron"
    )
    drill = '\n[[drill.assertion]]\nnode = "s1"\nsql = "SELECT count(*) FROM fat"\nexpected = 2000\n'
    with runs.fleet.path.open("a") as file:
        file.write(drill)
    report = run_drill(load_fleet(runs.fleet.path), RestoreRequest(NAME, allow_refused_ddl=True), runs.spark, Silent())
    assert [one.holds for one in report.assertions] == [True]
    assert report.result == "inconclusive"
    refused = {one.object for one in report.restored.refused}
    assert refused >= {
        "EXTENSION hll",
        "EXTENSION ip4r",
        "EXTENSION pg_cron",
        "EXTENSION pg_partman",
        "TABLE public.visit",
    }
    assert "TABLE public.event" not in refused


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def theirs(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        query = "SELECT data FROM pg_logical_slot_get_changes('theirs', NULL, NULL, 'format-version', '2')"
        return "".join(str(data).replace(" ", "") for (data,) in connection.execute(query))


VECTORS = """
CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext;
CREATE TABLE item (id int PRIMARY KEY, v ext.vector(3) NOT NULL DEFAULT '[0,0,0]',
       h ext.halfvec(4), s ext.sparsevec(5));
INSERT INTO item SELECT n, ARRAY[n, n / 3.0, -n]::real[]::ext.vector(3), ARRAY[n, 1, 2, 3]::real[]::ext.halfvec(4),
       ('{1:' || n || '}/5')::ext.sparsevec FROM generate_series(1, 300) AS n;
CREATE INDEX ON item USING hnsw (v ext.vector_l2_ops);
CREATE INDEX ON item USING ivfflat (v ext.vector_cosine_ops) WITH (lists = 2)
"""
VECTOR_CHANGES = (
    "UPDATE item SET v = '[1.5,2.25,-3]' WHERE id <= 20",
    "DELETE FROM item WHERE id > 280",
    "ALTER TABLE item ADD w ext.vector(2) DEFAULT '[1,2]'",
    "INSERT INTO item (id, w) VALUES (1000, NULL)",
)


@pytest.mark.parametrize("major", first(PGVECTOR))
def test_vectors_come_back_with_their_dimensions_and_indexes(tmp_path: Path, spark: SparkSession, major: int) -> None:
    server = Server(str(major), PGVECTOR[major].programs(), frozenset(), frozenset())
    come_back(tmp_path, spark, server, [VECTORS], VECTOR_CHANGES)


PARTITIONED = """
CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman;
CREATE TABLE item (id bigint, at timestamptz NOT NULL, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
SELECT partman.create_parent('public.item', 'at', 'native', 'daily', p_premake := 2);
ALTER TABLE partman.template_public_item REPLICA IDENTITY FULL;
INSERT INTO item SELECT n, now() FROM generate_series(1, 90) AS n;
INSERT INTO partman.custom_time_partitions VALUES ('public.item', 'public.item_p2026', '[2026-01-01, 2027-01-01)')
"""
CONFIGURED = ("UPDATE partman.part_config SET premake = 7, retention = '1 year'", MAINTENANCE)


def test_configuration_of_partitions_comes_back_also_in_a_drill(tmp_path: Path, spark: SparkSession) -> None:
    """A drill restores as a role that owns no table of an extension."""
    server = Server("15", OF_DEBIAN.programs(), frozenset(), frozenset({"pg_partman"}))
    premake = '[[drill.assertion]]\nnode = "s1"\nexpected = 7\nsql = "SELECT premake FROM partman.part_config"\n'
    come_back(tmp_path, spark, server, [PARTITIONED], CONFIGURED, assertion=premake)


def come_back(
    tmp_path: Path,
    spark: SparkSession,
    server: Server,
    contents: list[str],
    changes: tuple[str, ...],
    *,
    assertion: str = "",
) -> None:
    """Take a full snapshot of the contents and an increment with the changes, restore, compare, and drill."""
    with fleet_of(tmp_path / "fleet", [server]) as servers:
        (node,) = servers.primaries
        execute(node.dsn(), *contents)
        allowed = [name for name in server.extensions | {"vector"} if name != "plpgsql"]
        names = ", ".join(f'"{name}"' for name in sorted(allowed))
        drill = f'[drill]\npostgresql = "{server.programs}"\nextensions = [{names}]\n'
        drill += '[[drill.assertion]]\nnode = "s1"\nsql = "SELECT count(*) > 0 FROM item"\nexpected = true\n'
        drill += assertion
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=drill)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        execute(node.dsn(), *changes)
        runs.increment(NAME)
        (described,) = fleet.nodes
        there = replace(fleet, nodes=(with_database(described, BACK),))
        runs.restore(NAME, there)
        assert_back(node.dsn(), node.dsn(BACK))
    report = run_drill(fleet, RestoreRequest(NAME), runs.spark, Silent())
    assert (report.result, report.restored.refused) == ("holds", [])


# A table with rows of the types that the extension has; {} is the schema.
TYPES = {
    "citext": 'v citext COLLATE "C" UNIQUE',
    "cube": "v cube",
    "hstore": "v hstore",
    "isn": "v ean13",
    "ltree": "v ltree",
    "seg": "v seg",
    "lo": "v lo",
    "intarray": "v int[]",
}
VALUES = {
    "citext": "'Ab' || n",
    "cube": "cube(ARRAY[n, -n]::float8[], ARRAY[n + 1, n]::float8[])",
    "hstore": "hstore('k' || n, NULL) || hstore('b', n::text)",
    "isn": "'9780000000002'::ean13",
    "ltree": "('a.b' || n)::ltree",
    "seg": "(n || ' .. ' || n + 1)::seg",
    "lo": "n::oid::lo",
    "intarray": "ARRAY[n, n + 1]",
}
INDEXES = {
    "intarray": "USING gist (v gist__int_ops)",
    "cube": "USING gist (v)",
    "hstore": "USING gin (v)",
    "ltree": "USING gist (v)",
    "seg": "USING gist (v)",
}
PLAIN = """
CREATE TABLE item (id int PRIMARY KEY, t text NOT NULL, n int NOT NULL);
INSERT INTO item SELECT n, 'item ' || n, n FROM generate_series(1, 50) AS n
"""
ON_PLAIN = {
    "pg_trgm": "CREATE INDEX item_trgm ON item USING gin (t gin_trgm_ops)",
    "btree_gin": "CREATE INDEX item_gin ON item USING gin (n)",
    "btree_gist": "ALTER TABLE item ADD EXCLUDE USING gist (n WITH =)",
    "bloom": "CREATE INDEX item_bloom ON item USING bloom (n)",
    "unaccent": "CREATE TEXT SEARCH CONFIGURATION plain (COPY = simple)",
    "dict_int": "CREATE TEXT SEARCH DICTIONARY four (TEMPLATE = intdict_template, maxlen = 4)",
    "moddatetime": "ALTER TABLE item ADD at timestamptz; CREATE TRIGGER moved BEFORE UPDATE ON item FOR EACH ROW"
    " EXECUTE FUNCTION moddatetime(at)",
    "uuid-ossp": "CREATE TABLE named (id uuid PRIMARY KEY DEFAULT uuid_generate_v1mc());"
    " INSERT INTO named SELECT FROM generate_series(1, 9)",
    "pgcrypto": "CREATE TABLE hashed (id int PRIMARY KEY, h bytea DEFAULT digest('a', 'md5'));"
    " INSERT INTO hashed SELECT n FROM generate_series(1, 9) AS n",
    "file_fdw": "CREATE SERVER files FOREIGN DATA WRAPPER file_fdw",
    "postgres_fdw": "CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '127.0.0.1', port '1')",
    "tsm_system_rows": "CREATE VIEW sampled AS SELECT id FROM item TABLESAMPLE system_rows(1)",
    "tablefunc": "CREATE VIEW drawn AS SELECT * FROM normal_rand(1, 0, 0)",
}
# They replace each other's types or operators, or need a language that is not there.
ALONE = frozenset({"plpgsql"})


def contrib_script(extensions: frozenset[str]) -> list[str]:
    """Every extension, with tables, indexes and more of what it has."""
    script = [PLAIN, *(f'CREATE EXTENSION IF NOT EXISTS "{name}" CASCADE' for name in sorted(extensions - ALONE))]
    for name in sorted(extensions & TYPES.keys()):
        script += [
            f"CREATE TABLE of_{name} (id int PRIMARY KEY, {TYPES[name]})",
            f"INSERT INTO of_{name} SELECT n, {VALUES[name]} FROM generate_series(1, 40) AS n",
        ]
        if name in INDEXES:
            script.append(f"CREATE INDEX ON of_{name} {INDEXES[name]}")
    return script + [statement for name, statement in ON_PLAIN.items() if name in extensions]


@pytest.mark.parametrize("build", first([f"{major}{kind}" for major in MAJORS for kind in ("", "-icu")]))
def test_every_extension_of_a_build_comes_back(tmp_path: Path, spark: SparkSession, build: str) -> None:
    major, _, icu = build.partition("-")
    server = require_server(int(major), icu=bool(icu))
    changes = [
        statement
        for name in sorted(server.extensions & TYPES.keys())
        for statement in (
            f"UPDATE of_{name} SET v = (SELECT v FROM of_{name} WHERE id = 40) WHERE id <= 5"
            if name != "citext"
            else "UPDATE of_citext SET v = v || 'x' WHERE id <= 5",
            f"DELETE FROM of_{name} WHERE id > 35",
        )
    ]
    come_back(tmp_path, spark, server, contrib_script(server.extensions), (*changes, "UPDATE item SET n = n + 100"))


GEOMETRY = """
CREATE EXTENSION postgis; CREATE EXTENSION postgis_topology;
CREATE TABLE item (id int PRIMARY KEY, at geometry(Point, 4326) NOT NULL,
       area geography(Polygon, 4326) CHECK (ST_IsValid(area::geometry)),
       round geometry GENERATED ALWAYS AS (ST_Buffer(at, 1)) STORED);
INSERT INTO item (id, at, area) SELECT n, ST_SetSRID(ST_MakePoint(n % 180, n % 90), 4326),
       ST_GeogFromText('SRID=4326;POLYGON((0 0,0 1,1 1,0 0))') FROM generate_series(1, 300) AS n;
CREATE INDEX ON item USING gist (at);
INSERT INTO spatial_ref_sys (srid, srtext) VALUES (990001, 'own');
SELECT topology.CreateTopology('town', 4326);
ALTER TABLE town.relation REPLICA IDENTITY FULL
"""
GEOMETRY_CHANGES = (
    "UPDATE item SET at = ST_Translate(at, 1, 0) WHERE id <= 50",
    "DELETE FROM item WHERE id > 290",
    "SELECT topology.TopoGeo_AddPoint('town', ST_SetSRID(ST_MakePoint(1, 1), 4326))",
)


def test_geometries_come_back_and_their_topology_finds_its_types(tmp_path: Path, spark: SparkSession) -> None:
    servers = [server for folder in MORE_FOLDERS if "postgis" in (server := ask(folder)).extensions]
    if not servers:
        pytest.skip("SNAPSHOT_TEST_PG_BINS names no PostgreSQL with PostGIS")
    come_back(tmp_path, spark, servers[0], [GEOMETRY], GEOMETRY_CHANGES)
