"""A command as a process that notes what it has started and imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cutline.fleet.config import Fleet

ROOT = Path(__file__).parents[2]
# Prints the exit code, the programs of Spark that were started, and whether pyspark was imported.
NOTING = """
import json, sys
started = []
sys.addaudithook(lambda name, values: started.append(str(values[:2])) if name == "subprocess.Popen" else None)
from cutline.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, [one for one in started if "spark" in one or "java" in one], "pyspark" in sys.modules]))
"""


def noted(fleet: Fleet, *words: str, before: str = "") -> Any:
    """Run `snapshot …` after the program `before`.

    Returns the exit code, the programs of Spark that it started, and whether it imported pyspark.
    """
    done = subprocess.run(
        [sys.executable, "-c", before + NOTING, "--quiet", "--fleet", str(fleet.path), *words],
        capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])
