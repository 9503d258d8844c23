"""Every command whose folder for temporary files is full names the folder, and what to do.

The folder is a file system of its own, with room for a few files only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.fleet.config import Fleet
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root and mount(8): a file system with little room"
)

NAME, SECONDS_MAX = "small", 300
# The archive of their DDL does not fit into the folder, and neither do the files of a shuffle.
TABLES = [f"CREATE TABLE t{number} (id int PRIMARY KEY, v text DEFAULT '{'x' * 2000}')" for number in range(300)]
ROOM = "64k"
BY_SPARK = "from tests.run.by_spark import work_by_spark; work_by_spark(); from cutline.cli.main import main; main()"
MOUNT = f'mount -t tmpfs -o size={ROOM} none "$1" && shift && exec "$@"'


@pytest.fixture(scope="module")
def fleet(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with own_database(shared_fleet, tmp_path_factory.mktemp("full"), NAME) as fleet:
        execute(fleet.nodes[0].dsn, *TABLES, "INSERT INTO t1 SELECT n FROM generate_series(1, 20000) AS n")
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        execute(fleet.nodes[0].dsn, "UPDATE t1 SET v = 'y'")
        runs.increment(NAME)
        yield fleet


@pytest.mark.parametrize(
    "words",
    [
        ("create", "other"),
        ("check", NAME, "--restorable"),
        ("check", NAME, "--live"),
        ("merge", NAME),
        ("restore", NAME, "--replace", "--yes"),
        ("drill", NAME),
    ],
    ids=lambda words: "-".join(words[:1] + words[2:3]),
)
def test_a_full_folder_for_temporary_files_is_named_with_what_to_do(
    fleet: Fleet, tmp_path: Path, words: tuple[str, ...]
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = subprocess.run(
        [
            "unshare", "--mount", "sh", "-c", MOUNT, "sh", str(folder), sys.executable, "-c", BY_SPARK,
            "--fleet", str(fleet.path), "--json", *words,
        ],
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert (done.returncode, document.get("error")) == (6, "no-space"), document
    assert document["message"].startswith("no space is left for temporary files: ")
    assert f"free space in {folder}, or set TMPDIR to a folder with more space" in document["hint"]
