"""The JVM on this machine: which options it has, who starts it, what it has loaded, and its workers.

Sessions start in subprocesses: a process has one session at a time, here the fixture's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from cutline.spark.java import ABSENT_MODULE_ARGUMENT, find_java
from cutline.spark.jvm_command import GATEWAY, is_submitted, jvm_command
from tests.run.quick_spark import QUICK

pytestmark = pytest.mark.usefixtures("temporary_files_of_subprocesses")

SPARK_HOME = Path(pyspark.__file__).parent
SECONDS_MAX = 180
# Prints the JVM's command and options, and whether the process has a session after a plain job and after a query.
SESSION = """
import json, sys
from cutline.spark.start import start_spark_at
from pyspark.sql import SparkSession

settings = json.loads(sys.argv[1])
with start_spark_at("local[2]", settings, "test", is_brief="brief" in sys.argv) as start:
    session = start.session()
    hashes = session.sparkContext.parallelize(range(2), 2).map(lambda _: hash("text")).collect()
    after_job = SparkSession._instantiatedSession is not None
    count = session.range(7).count()
    after_query = SparkSession._instantiatedSession is not None
    jvm = session.sparkContext._jvm
    beans = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    print(json.dumps({
        "arguments": list(beans.getInputArguments()), "main": jvm.System.getProperty("sun.java.command"),
        "after_job": after_job, "after_query": after_query, "count": count, "same": len(set(hashes)) == 1,
        "class_path": jvm.System.getProperty("java.class.path"),
    }))
"""
# Prints whether a process from which Spark forks workers exists although there was no job.
WORKERS = """
import json, time
from pathlib import Path
from cutline.spark.start import start_spark_at

def children(pid):
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for file in found for child in file.read_text().split()]

with start_spark_at("local[2]", {}, "test") as start:
    start.session()
    is_started, until = False, time.monotonic() + 60
    while not is_started and time.monotonic() < until:
        commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children(start._gateway.proc.pid)]
        is_started = any(b"cutline.spark.python_daemon" in command for command in commands)
        time.sleep(0.1)
    print(json.dumps(is_started))
"""
# Begins twice, as a check of two snapshots does; prints whether the JVM was replaced, and each JVM's options.
BEGINS = """
import json, sys
from pathlib import Path
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.spark.amount import Amount
from cutline.spark.on_demand import SparkOnDemand

found = []
with SparkOnDemand(load_fleet(Path(sys.argv[1])), "check") as spark:
    for rows in map(int, sys.argv[2:]):
        spark.begin(None, Silent(), Amount(changes=rows))
        jvm = spark.session().sparkContext._jvm
        beans = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
        found.append([beans.getPid(), "-XX:TieredStopAtLevel=1" in list(beans.getInputArguments())])
print(json.dumps(found))
"""
# The same with executors; prints each driver's process, and the last options of its executors.
BEGINS_WITH_EXECUTORS = """
import json, sys
from pathlib import Path
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.spark.amount import Amount
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.on_demand import SparkOnDemand

fleet, found = load_fleet(Path(sys.argv[1])), []
with SparkOnDemand(fleet, "check") as spark:
    for rows in map(int, sys.argv[2:]):
        spark.begin(ExecutorNeeds(fleet.store, ()), Silent(), Amount(changes=rows))
        context = spark.session().sparkContext
        pid = context._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getPid()
        told = context.parallelize([0], 1).map(lambda _: open(f"/proc/{__import__('os').getppid()}/status").read())
        parent = int(told.first().split("PPid:")[1].split()[0])
        words = Path(f"/proc/{parent}/cmdline").read_text().split("\\0")
        found.append([pid, [word for word in words if word.startswith(("-XX:TieredStop", "-Dx"))]])
print(json.dumps(found))
"""
# Starts executors on this machine as those of a cluster are started: with what the platform says of them, and without
# options that only this machine needs. Prints their options.
PLATFORM = """
import json, os, sys
from cutline.spark import settings, start

os.environ["SPARK_CONF_DIR"] = sys.argv[1]
start.drop_foreign_variables = lambda master: None
places = settings._places_on_this_machine
settings._places_on_this_machine = lambda temporary: {
    name: value for name, value in places(temporary).items() if name != settings.EXECUTOR_OPTIONS
}
with start.start_spark_at("local-cluster[1,1,1024]", {}, "test", is_brief=True) as begun:
    print(json.dumps(begun.session().sparkContext.getConf().get(settings.EXECUTOR_OPTIONS).split()))
"""
FLEET = """
name = "few"
store = "file:///nowhere"
[[node]]
id = "s1"
dsn = "host=127.0.0.1 dbname=none"
"""


def run(program: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def launched_options(tmp_path: Path) -> list[str]:
    """Return the options that Spark's own launcher gives to a JVM with one gigabyte."""
    java = find_java(tmp_path).home / "bin" / "java"
    launch = ["org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit", "--driver-memory", "1g"]
    printed = subprocess.run(
        [java, "-cp", f"{SPARK_HOME}/jars/*", *launch, "pyspark-shell"],
        capture_output=True,
        timeout=SECONDS_MAX,
        env={"SPARK_HOME": str(SPARK_HOME), "SPARK_SCALA_VERSION": "2.13", "PATH": os.environ["PATH"]},
        check=True,
    ).stdout.decode()
    words = printed.strip().split("\0")
    return words[words.index("-cp") + 1 : words.index("org.apache.spark.deploy.SparkSubmit")]


def test_the_options_are_those_of_sparks_launcher_and_the_settings(tmp_path: Path) -> None:
    settings = {
        "spark.driver.memory": "1g",
        "spark.driver.defaultJavaOptions": "-Da=first",
        "spark.driver.extraJavaOptions": '-Da=second "-Db=two words\\\\"',
    }
    java = find_java(tmp_path)
    command = jvm_command(java, SPARK_HOME, settings, tmp_path)
    assert (command[0], command[-1]) == (str(java.home / "bin" / "java"), GATEWAY)
    file = tmp_path / "jvm-options.txt"
    assert file.stat().st_mode & 0o777 == 0o600
    assert command[1] == f"@{file}"
    assert not any("two words" in word for word in command)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[-3:] == ["-Da=first", "-Da=second", "-Db=two words\\"]
    # That module is in preview, and nothing here needs it. Derby is for a metastore, which no session has.
    left_out = {ABSENT_MODULE_ARGUMENT, "-Dderby.connection.requireAuthentication=false"}
    expected = launched_options(tmp_path)
    assert lines[1] == expected[0]
    assert {*expected[1:]} - left_out <= {*lines[2:-3]}


@pytest.mark.parametrize(
    ("name", "submitted"),
    [
        ("spark.jars.packages", True),
        ("spark.driver.extraClassPath", True),
        ("spark.driver.extraJavaOptions", False),
        ("spark.driver.memory", False),
        ("spark.io.encryption.enabled", False),
    ],
)
def test_only_settings_for_spark_submit_need_it(name: str, submitted: bool) -> None:  # noqa: FBT001  # of the case
    assert is_submitted({name: "x"}) == submitted


def test_plain_jobs_make_no_session_and_no_optimised_code() -> None:
    found = run(SESSION, json.dumps({"spark.driver.memory": "1g"}), "brief")
    assert found["main"] == GATEWAY
    assert QUICK in found["arguments"]
    assert (found["after_job"], found["after_query"], found["count"]) == (False, True, 7)
    assert found["same"], "workers must hash strings alike"


def test_spark_submit_starts_the_jvm_if_settings_need_it(tmp_path: Path) -> None:
    settings = {"spark.driver.memory": "1g", "spark.driver.extraClassPath": str(tmp_path)}
    found = run(SESSION, json.dumps(settings))
    assert found["main"].startswith("org.apache.spark.deploy.SparkSubmit")
    assert found["class_path"].startswith(str(tmp_path))
    assert QUICK not in found["arguments"]
    assert found["count"] == 7


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_process_from_which_workers_are_forked_starts_with_the_session() -> None:
    assert run(WORKERS)


def test_many_rows_to_shuffle_start_a_jvm_with_the_optimising_compiler(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    few, same, many, fewer = run(BEGINS, str(file), "0", "1000000", "1000001", "5")
    assert few == same
    assert few[1]
    assert many[0] != few[0]
    assert not many[1]
    assert fewer == many


def test_executors_of_plain_jobs_have_no_optimising_compiler(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    options = '[spark]\nmaster = "local-cluster[1,1,1024]"\n"executor.extraJavaOptions" = "-Dx=1"\n'
    (tmp_path / "store").mkdir()
    # Executors must be able to read it.
    (tmp_path / "store" / "fleet.json").write_text("{}")
    file.write_text(f"{FLEET.replace('/nowhere', str(tmp_path / 'store'))}{options}")
    brief, other = run(BEGINS_WITH_EXECUTORS, str(file), "1", "2000000")
    assert brief[0] != other[0]
    assert brief[1] == ["-XX:TieredStopAtLevel=1", "-Dx=1"]
    assert other[1] == ["-Dx=1"]


def test_what_the_platform_says_of_executors_stays(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.executor.extraJavaOptions -Dx=platform\n")
    assert run(PLATFORM, str(tmp_path))[-2:] == ["-XX:TieredStopAtLevel=1", "-Dx=platform"]
