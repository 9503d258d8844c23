"""Every file of a Spark session is in its command's folder, which the next command deletes after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.quick_spark import SETTINGS
from tests.run.soak import first
from tests.spark.session_processes import END_SECONDS_MAX, assert_gone, list_processes

pytestmark = pytest.mark.usefixtures("temporary_files_of_subprocesses")

# Runs jobs that load native libraries, write blocks and store artifacts, and then waits.
EVERY_FILE = """
import json, sys, tempfile, time
from cutline.spark.session_folder import session_folder
from cutline.spark.start import start_spark_at

with session_folder() as folder, start_spark_at(sys.argv[1], json.loads(sys.argv[2]), "test") as start:
    session = start.session()
    rows = session.range(1000).repartition(4).selectExpr("id", "repeat('x', 1000) AS x")
    for codec in ("zstd", "snappy", "lz4_raw"):
        rows.write.option("compression", codec).parquet(f"{start.temporary}/{codec}")
        assert session.read.parquet(f"{start.temporary}/{codec}").groupBy("x").count().count() == 1
    rows.mapInArrow(lambda batches: batches, rows.schema).persist().count()
    print("started", start._gateway.proc.pid, folder, flush=True)
    time.sleep(120)
"""


def open_files(session: int) -> set[Path]:
    """Return what the processes of a session map or have open in folders for temporary files."""
    found = set()
    for pid, other in list_processes():
        if other == session:
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths = {line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in mapped if "/" in line}
            paths |= {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
            # The project and what is installed may lie there too.
            paths = {path for path in paths if not path.startswith((sys.prefix, str(Path.cwd())))}
            found |= {Path(path) for path in paths if path.startswith(("/tmp/", "/var/tmp/"))}
    return found


@pytest.mark.parametrize("master", first(["local[2]", "local-cluster[1,2,1024]"]))
def test_every_file_is_in_the_session_folder_which_the_next_command_deletes_after_a_kill(master: str) -> None:
    temporary = Path(os.environ["TMPDIR"])
    # Without a cache the JVM writes no class archive when it ends, which takes longer than all the rest.
    environment = os.environ | {"XDG_CACHE_HOME": os.devnull}
    with subprocess.Popen(
        [sys.executable, "-c", EVERY_FILE, master, json.dumps(SETTINGS)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        _, jvm, folder = process.stdout.readline().split()
        opened = open_files(int(jvm))
        assert {path.suffix for path in opened if path.is_relative_to(folder)} >= {".so"}, "no library was loaded"
        assert {path for path in opened if not path.is_relative_to(folder)} == set()
        assert [str(path) for path in temporary.iterdir()] == [folder]
        assert {path.stat().st_mode & 0o077 for path in temporary.iterdir()} == {0}
        process.kill()
        process.communicate(timeout=END_SECONDS_MAX)
    assert_gone(int(jvm))
    assert Path(folder).exists()
    # It begins a session and ends: there is no fleet file.
    next_command = "from cutline.cli.main import main; main()", "list", "--fleet", os.devnull + "/absent"
    assert subprocess.run([sys.executable, "-c", *next_command], check=False).returncode == 2
    assert list(temporary.iterdir()) == []
