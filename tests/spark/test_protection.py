"""Sessions whose processes authenticate and encrypt, on real clusters; and what another user of the machine sees.

The other user looks at the command lines of all processes, from the start of the session to its end. The sessions run
in processes of their own, as a process has one session at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cutline.spark.settings import PROTECTION, SECRET
from tests.run.command_lines import recording, seen_programs
from tests.run.quick_spark import SETTINGS
from tests.run.soak import SOAK_SECONDS
from tests.spark.standalone_cluster import standalone_cluster, standalone_master

JOB_SECONDS_MAX = 240
HIDDEN_VALUE = f"UNMISTAKABLE{uuid.uuid4().hex}"
SECRETIVE = {
    "spark.hadoop.fs.s3a.secret.key": f"{HIDDEN_VALUE} x\\y=z: ü",
    "spark.my.token": HIDDEN_VALUE,
    "spark.driver.extraJavaOptions": f"{SETTINGS['spark.driver.extraJavaOptions']} -Dq.password={HIDDEN_VALUE}",
}
SMALL = {
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": SETTINGS["spark.executor.extraJavaOptions"],
}

# Prints as JSON what the session has, or the code and message of its error. The job broadcasts and shuffles.
JOB = """
import json, pathlib, sys
from cutline.spark.start import start_spark_at
from cutline.storage.errors import SnapshotError

def run(session):
    context = session.sparkContext
    sent = context.broadcast({"row": "BROADCAST-ROW" * 100})
    rows = context.parallelize(range(8), 4).map(lambda number: (number, len(sent.value["row"]))).collect()
    counted = session.range(1000).repartition(4).groupBy("id").count().count()
    jvm, conf = session._jvm.System, context.getConf()
    return {
        "rows": len(rows), "counted": counted, "executors": session._jsc.sc().getExecutorMemoryStatus().size(),
        "password": jvm.getProperty("q.password"), "conf": dict(conf.getAll()),
    }

try:
    with start_spark_at(sys.argv[1], json.loads(sys.stdin.read()), "test") as start:
        print(json.dumps(run(start.session())))
except SnapshotError as error:
    print(json.dumps({"code": error.exit_code, "error": f"{error.message} {error.hint}"}))
"""


def run_job(master: str, settings: Mapping[str, str]) -> dict[str, object]:
    """Run JOB in a process with an installed Python's environment; stderr must be empty."""
    done = subprocess.run(
        [sys.executable, "-c", JOB, master], input=json.dumps(dict(settings)), capture_output=True, text=True,
        timeout=JOB_SECONDS_MAX, check=False, env=os.environ | {"PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    output: dict[str, object] = json.loads(done.stdout)
    return output


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_no_secret_of_the_settings_is_on_a_command_line() -> None:
    lines: set[bytes] = set()
    with recording(lines):
        output = run_job("local-cluster[2,1,1024]", SMALL | SECRETIVE | {"spark.io.encryption.enabled": "true"})
    assert (output["rows"], output["counted"], output["executors"]) == (8, 1000, 3)
    conf = output["conf"]
    assert isinstance(conf, dict)
    assert output["password"] == HIDDEN_VALUE
    assert conf["spark.hadoop.fs.s3a.secret.key"] == SECRETIVE["spark.hadoop.fs.s3a.secret.key"]
    assert {name: conf[name] for name in PROTECTION} == PROTECTION
    assert {"CoarseGrainedExecutorBackend", "SparkSubmit"} <= seen_programs(lines)
    secrets = [HIDDEN_VALUE.encode(), conf[SECRET].encode()]
    assert not [line for line in lines if any(secret in line for secret in secrets)]


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
def test_a_cluster_whose_secret_is_known_runs_the_job_and_shows_no_secret(tmp_path: Path) -> None:
    secret = f"UNMISTAKABLE{uuid.uuid4().hex}"
    lines: set[bytes] = set()
    with (
        standalone_cluster(tmp_path / "cluster", PROTECTION | {SECRET: secret}) as master,
        recording(lines),
    ):
        output = run_job(master, SMALL | SECRETIVE | {SECRET: secret})
    assert (output["rows"], output["counted"], output["executors"]) == (8, 1000, 2), output
    assert "CoarseGrainedExecutorBackend" in seen_programs(lines)
    files = [path for path in (tmp_path / "cluster").rglob("*") if path.is_file() and path.suffix != ".properties"]
    written = [path.read_bytes() for path in files]
    assert any(b"Executor Command" in text for text in written), "no log of an executor was seen"
    shown = [text for text in [*lines, *written] if secret.encode() in text or HIDDEN_VALUE.encode() in text]
    assert not shown


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
def test_a_cluster_with_another_secret_or_none_gets_no_session(tmp_path: Path) -> None:
    """Whoever answers at the master's address must prove that it knows the secret, before it gets a task.

    Spark asks a master three times, 20 s each.
    """
    with (
        standalone_master(tmp_path / "other", PROTECTION | {SECRET: "another secret"}) as other,
        standalone_master(tmp_path / "none", {}) as open_one,
        ThreadPoolExecutor() as threads,
    ):
        given = SMALL | {SECRET: "the secret of the cluster"}
        outputs = list(threads.map(lambda master: run_job(master, given), (other, open_one)))
    for output in outputs:
        assert output["code"] == 3, output
        assert "different secrets (spark.authenticate.secret)" in str(output["error"])
        assert "the secret of the cluster" not in str(output["error"])
