"""Every command whose folder for temporary files is full names the folder, and what to do.

The folder is a file system of its own, with room for a few files only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

ROOT = Path(__file__).parents[2]
NAME, SECONDS_MAX = "small", 300
# The archive of their DDL does not fit into the folder, and neither do the files of a shuffle.
TABLES = [f"CREATE TABLE t{number} (id int PRIMARY KEY, v text DEFAULT '{'x' * 2000}')" for number in range(300)]
ROOM, ROOM_OF_SERVERS = "64k", "16m"
BY_SPARK = "from tests.run.by_spark import work_by_spark; work_by_spark(); from cutline.cli.main import main; main()"
MOUNT = 'mount -t tmpfs -o size="$1",mode=1777 none "$2" && shift 2 && exec "$@"'
# An ordinary user, who may read all: this Python or this tree may be in root's own folder.
AS_NOBODY = (
    "setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)  # fmt: skip


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
    ids=lambda words: "".join(words[:1] + words[2:3]),
)
def test_a_full_folder_for_temporary_files_is_named_with_what_to_do(
    fleet: Fleet, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, document = run_with_room(fleet.path, tmp_path, ROOM, words)
    assert (code, document.get("error")) == (6, "no-space"), document
    assert document["message"].startswith("no space is left for temporary files: ")
    assert f"free space in {tmp_path}/tmp, or set TMPDIR to a folder with more space" in document["hint"]


def test_the_folder_of_a_drills_servers_is_named(fleet: Fleet) -> None:
    """Root's servers have it elsewhere, so an ordinary user drills."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv(1): another user")
    tried = subprocess.run([*AS_NOBODY, "sh", "-c", '"$0" -c "import cutline.cli.main"', sys.executable], check=False)
    if tried.returncode != 0:
        pytest.skip("another user may not read this Python or this tree")
    # Not below pytest's own folder, which is root's.
    with tempfile.TemporaryDirectory() as name:
        place, path = Path(name), Path(name) / "fleet.toml"
        shutil.copytree(fleet.path.parent / "store", place / "store")
        path.write_text(fleet.path.read_text().replace(str(fleet.path.parent), name))
        for one in (place, *place.rglob("*")):
            shutil.chown(one, "nobody")
        code, document = run_with_room(path, place, ROOM_OF_SERVERS, ("drill", NAME), AS_NOBODY)
        assert (code, document.get("error")) == (6, "program-failed"), document
        assert (
            f"free space in {place}/tmp, where the drill's servers have their data, or set TMPDIR" in document["hint"]
        )


# Fills the store, and removes what fits into it.
FILL = """
import sys
from cutline.storage.open import open_store
from cutline.storage.store import StoreUnreachableError
store = open_store(f"file://{sys.argv[1]}", {})
store.create("garbage", b"x" * 10_000)
try:
    store.create("object", b"x" * 100_000)
except StoreUnreachableError as error:
    store.delete("garbage")
    print(error.exit_code, store.list(""), error.hint)
"""


def test_a_full_store_is_named_with_what_makes_room(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, "sh", ROOM, str(tmp_path), sys.executable, "-c", FILL, str(tmp_path)],
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd="/",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.startswith("6 [] make room in the folder's file system"), done.stdout + done.stderr
    assert "delete and prune need room" in done.stdout


def run_with_room(
    fleet: Path, place: Path, room: str, words: Sequence[str], by: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    """Run the command with so much room for temporary files; return its exit code and its document."""
    folder = place / "tmp"
    folder.mkdir(mode=0o1777)
    program = (sys.executable, "-c", BY_SPARK, "--fleet", str(fleet), "--json", *words)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNT, "sh", room, str(folder), *by, *program],
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd="/",
        env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
