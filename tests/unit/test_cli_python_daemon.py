"""The daemon of Spark's Python workers can be forked: what it imports starts no threads but jemalloc's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cutline.spark.settings import session_settings

LIST_THREADS = """
import os
from cutline.spark.python_daemon import preload
preload()
for thread in os.listdir("/proc/self/task"):
    if int(thread) != os.getpid():
        print(open(f"/proc/self/task/{thread}/comm").read().strip())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to list threads")
def test_the_modules_that_the_daemon_imports_start_no_threads() -> None:
    listed = subprocess.run([sys.executable, "-c", LIST_THREADS], capture_output=True, text=True, check=True)
    assert set(listed.stdout.splitlines()) <= {"jemalloc_bg_thd"}


@pytest.mark.parametrize(
    ("master", "is_ours"), [("local[2]", True), ("local-cluster[2,1,1024]", False), ("spark://db:7077", False)]
)
def test_executors_keep_sparks_daemon(master: str, is_ours: bool, tmp_path: Path) -> None:  # noqa: FBT001  # a parameter of the case
    settings = session_settings(master, {"spark.authenticate.secret": "of the cluster"}, "test", tmp_path, [])
    assert (settings.get("spark.python.daemon.module") == "cutline.spark.python_daemon") is is_ours
