"""What a command imports before it works, and how fast help answers: neither waits for Spark."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
# Of the processor time that the help of an application without commands takes, on whatever machine.
HELP_RATIO_MAX = 1.6
HELP_ATTEMPTS = 5


def test_help_imports_neither_spark_nor_a_command() -> None:
    loaded = modules_after("import contextlib\nfrom cutline.cli.main import run\nrun(['--help'])")
    assert not loaded & {"pyspark", "pandas", "pyarrow", "numpy", "psycopg", "fsspec"}
    assert not loaded & {entry.module for entry in COMMANDS.values()}


@pytest.mark.parametrize("name", ["delete", "gc", "history", "init", "list", "prune", "report", "show", "status"])
def test_commands_that_read_no_rows_import_nothing_for_rows(name: str) -> None:
    """Arrow and numpy take a third of the processor time of such a command."""
    assert not modules_after(f"import {COMMANDS[name].module}") & {"pyspark", "pandas", "pyarrow", "numpy"}


def test_a_check_of_snapshots_imports_nothing_of_restores_and_running_databases() -> None:
    """A third of the processor time of its imports was theirs."""
    loaded = modules_after(f"import {COMMANDS['check'].module}")
    assert not {name for name in loaded if name.startswith(("cutline.restore", "cutline.check.live", "http.server"))}


def test_a_restore_imports_no_servers_of_drills() -> None:
    assert "cutline.embedded" not in modules_after(f"import {COMMANDS['restore'].module}")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_command_imports_spark_before_it_starts_a_session(name: str) -> None:
    assert "pyspark" not in modules_after(f"import {COMMANDS[name].module}")


def modules_after(program: str) -> set[str]:
    """The modules that are imported once `program` has run in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint('loaded:', *sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.rpartition("loaded:")[2].split())


EMPTY_APPLICATION = """
import typer
app = typer.Typer()
app.command()(lambda: None)
app()
"""


OWN_APPLICATION = "from cutline.cli.entry import main; main()"


def test_help_answers_at_once(tmp_path: Path) -> None:
    """In processor time, which other load does not add to. The first attempt compiles the modules for the others."""
    compiled = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    seconds: dict[str, list[float]] = {EMPTY_APPLICATION: [], OWN_APPLICATION: []}
    for _ in range(HELP_ATTEMPTS):
        for program, taken in seconds.items():
            began = processor_seconds()
            command = [sys.executable, "-c", program, "--help"]
            subprocess.run(command, capture_output=True, timeout=60, check=True, cwd=ROOT, env=compiled)
            taken.append(processor_seconds() - began)
    least = min(seconds[EMPTY_APPLICATION])
    assert min(seconds[OWN_APPLICATION]) <= least * HELP_RATIO_MAX, f"{seconds} s"


def processor_seconds() -> float:
    """What the child processes of this process have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
