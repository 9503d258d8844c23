"""The command line of an executor on Kubernetes, from the variables that Spark gives to its pod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.spark import executor
from cutline.spark.executor import NotInPodError, executor_command

JAVA, HOME = Path("/j/bin/java"), Path("/spark")
# As in a pod that Spark made; two-digit numbers, so that text and number order them in different ways.
GIVEN = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "a-exec-3",
    "SPARK_EXECUTOR_MEMORY": "700m",
    **{f"SPARK_JAVA_OPT_{number}": f"-Dn={number}" for number in (10, 2, 0)},
}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "is_unnamed_user", lambda: False)


@pytest.mark.usefixtures("named")
def test_the_variables_become_options_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    command = executor_command(JAVA, HOME, GIVEN | {"SPARK_CLASSPATH": "/x.jar", "SPARK_CONF_DIR": "/conf"}, tmp_path)
    assert command[0] == "/j/bin/java"
    assert [word for word in command if word.startswith("-Dn=")] == ["-Dn=0", "-Dn=2", "-Dn=10"]
    assert {"-Xms700m", "-Xmx700m", f"-Djava.io.tmpdir={tmp_path}"} <= set(command)
    assert command[command.index("-cp") + 1] == "/x.jar:/conf:/spark/jars/*"
    backend = command.index("org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend")
    words = command[backend + 1 :]
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--driver-url": "spark://CoarseGrainedScheduler@driver:7078",
        "--executor-id": "3",
        "--cores": "2",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.7",
        "--resourceProfileId": "0",
        "--podName": "a-exec-3",
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("name", ["SPARK_DRIVER_URL", "SPARK_EXECUTOR_MEMORY"])
def test_a_missing_variable_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotInPodError, match=f"not an executor's pod: {name} is not set"):
        executor_command(JAVA, HOME, {key: value for key, value in GIVEN.items() if key != name}, tmp_path)


def test_outside_of_a_pod_the_program_ends_with_a_hint() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    done = subprocess.run(
        [sys.executable, "-m", "cutline.spark.executor"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: this is not an executor's pod: SPARK_DRIVER_URL, ")
    assert "docs/kubernetes.md" in done.stderr
