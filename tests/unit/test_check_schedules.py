"""The lines of docs/check.md for schedulers do with each exit code what the page says.

The command itself runs in tests/integration/test_docs_commands.py. Here, a program in its place exits with each code.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cutline.cli.output.failure import BUSY, CANCELLED, CONFLICTS, DONE, INCONCLUSIVE, MEANINGS, UNREACHABLE
from tests.integration.shown_commands import ShownCommand, blocks_of, parse
from tests.programs.lacking import skip_without

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "check.md").read_text(encoding="utf-8")
COMMAND = "snapshot check --quiet --junit check.xml"
# As `timeout` exits; GNU coreutils manual, "timeout".
TIMED_OUT = 124
# As with --quiet, it prints nothing only if the code is 0.
PROGRAM = """#!/bin/sh
[ "$*" = "check --quiet --junit check.xml" ] || exit 99
trap 'kill $! 2>/dev/null; echo stopped; exit 8' TERM
if [ -n "$SLEEPS" ]; then sleep "$SLEEPS" & wait; fi
echo report >check.xml
[ "$EXITS" = 0 ] || echo "result $EXITS"
exit "$EXITS"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a program `snapshot`, and a `logger` that prints what it is to log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("snapshot", PROGRAM), ("logger", '#!/bin/sh\necho "$2: $3"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def ended(shell: list[str], text: str, programs: Path, code: int, sleeps: str = "") -> tuple[int, str]:
    """Run a text in a shell; return its exit code and what cron would mail."""
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "EXITS": str(code), "SLEEPS": sleeps}
    done = subprocess.run(
        [*shell, text], cwd=programs.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def cron_line() -> str:
    """The command of the page's line for /etc/cron.d, after the five fields of the time and the user."""
    (line,) = [line for block in blocks_of(PAGE) for line in block if re.match(r"[\d* ]+ cutline ", line)]
    *when, user, command = line.split(None, 6)
    assert (len(when), user) == (5, "cutline")
    assert re.fullmatch(r"[0-5]?\d (?:1?\d|2[0-3]) \* \* \*", " ".join(when))
    # In a crontab, % begins the input of the command.
    assert "%" not in command
    return command


def test_cron_mails_whatever_is_not_zero(programs: Path) -> None:
    if not (shutil.which("flock") and shutil.which("timeout")):
        skip_without("flock", "or timeout: they are not on the PATH")
    folder = programs.parent / "state"
    folder.mkdir()
    line = cron_line().replace("/var/lib/cutline", str(folder))
    for code in MEANINGS:
        assert ended(["/bin/sh", "-c"], line, programs, code) == (code, "" if code == DONE else f"result {code}\n")
    assert (folder / "check.xml").read_text() == "report\n"
    # A check that hangs is stopped, and says so.
    stopped = ended(["/bin/sh", "-c"], line.replace("timeout 12h", "timeout 1s"), programs, DONE, sleeps="30")
    assert stopped == (TIMED_OUT, "stopped\n")
    # The next one does not wait for it.
    with (folder / "check.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ended(["/bin/sh", "-c"], line, programs, CONFLICTS) == (BUSY, "")


def test_the_script_tells_what_was_found_from_what_was_not_checked(programs: Path) -> None:
    (script,) = [block for block in blocks_of(PAGE) if block[0] == "#!/bin/sh"]
    said = {code: ended(["/bin/sh", "-c"], "\n".join(script), programs, code)[1].splitlines()[-1:] for code in MEANINGS}
    assert said.pop(DONE) == []
    assert said.pop(CONFLICTS) == ["user.crit: snapshot check found conflicts"]
    assert said.pop(INCONCLUSIVE) == ["user.warning: snapshot check did not compare everything"]
    assert set(map(tuple, said.values())) == {("user.err: snapshot check did not end: it proves nothing",)}
    assert {UNREACHABLE, CANCELLED} < said.keys()


def workflow() -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true; GitHub reads YAML 1.2.
    text = (DOCS / "github" / "check.yml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(re.sub(r"(?m)^on:", '"on":', text)))


def test_the_workflow_fails_with_the_check_and_keeps_the_report(programs: Path) -> None:
    read = workflow()
    (when,) = read["on"]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])
    (job,) = read["jobs"].values()
    # GitHub stops a hosted runner after six hours.
    assert job["timeout-minutes"] < 360
    steps = {step["name"]: step for step in job["steps"] if "name" in step}
    command = steps["check"]["run"]
    assert command == COMMAND
    # "Workflow syntax for GitHub Actions", jobs.<job_id>.steps[*].shell, on Linux without a shell.
    for code in MEANINGS:
        assert ended(["bash", "-e", "-c"], command, programs, code)[0] == code
    kept = steps["keep the report"]
    assert (kept["if"], kept["with"]["path"]) == ("${{ !cancelled() }}", "check.xml")
    (accepting,) = [line for block in blocks_of(PAGE) for line in block if line.startswith("run: ")]
    accepted = accepting.removeprefix("run: ")
    for code in MEANINGS:
        assert (ended(["bash", "-e", "-c"], accepted, programs, code)[0] == 0) == (code in (DONE, INCONCLUSIVE))


def test_the_page_names_every_code_of_a_check() -> None:
    table = PAGE[PAGE.index("# What a check proves") : PAGE.index("## What 0 means")]
    named = {int(code) for cell in re.findall(r"(?m)^\| ([\d, ]+) \|", table) for code in cell.split(",")}
    # A check decides nothing, takes no lock and makes no cut; and it restores nothing.
    assert MEANINGS.keys() - named == {5, 7, 9, 10}
    assert named < MEANINGS.keys()


def test_the_jobs_of_all_schedulers_run_the_same_check() -> None:
    parse(ShownCommand("check.md", COMMAND))
    job = yaml.safe_load((DOCS / "kubernetes" / "cron" / "check.yaml").read_text())
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["check", "--quiet"]
    pod = yaml.safe_load((DOCS / "kubernetes" / "pod" / "cron-pod.yaml").read_text())
    # A check that failed is not repeated, and its log is kept.
    assert pod["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0
    assert pod["spec"]["jobTemplate"]["spec"]["ttlSecondsAfterFinished"] >= 86400
