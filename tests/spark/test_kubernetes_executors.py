"""Executors on Kubernetes: the pod that Spark makes of the template in docs/kubernetes, and what runs in it.

Spark's own classes render the pod, without an API server. The program of the pod then runs here, with the variables of
that pod, as an executor of a driver that has no other: it does not need to be in a pod.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from cutline.spark.settings import PROTECTION, SECRET, session_settings
from tests.spark.standalone_cluster import standalone_master
from tests.unit.test_kubernetes_manifests import RELEASES, TEMPLATE_FILE, driver_pods, fleet_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
END_SECONDS_MAX = 20
# In a namespace of its own this process has that number, and no name; it may read what it may read here.
UNNAMED = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
# A driver without executors of its own; prints where it listens, then the result of a job.
DRIVER = """
import json, sys
from cutline.spark.start import start_spark_at

with start_spark_at(sys.argv[1], json.loads(sys.stdin.readline()), "test") as start:
    context = start.session().sparkContext
    print(context.getConf().get("spark.driver.port"), context.applicationId, flush=True)
    numbers = context.parallelize(range(8), 4)
    print(numbers.map(lambda number: (number % 2, number)).groupByKey().count(), flush=True)
"""


def module_of(jvm: Any, name: str) -> Any:
    """The only instance of a Scala object."""
    package, _, last = name.rpartition(".")
    owner = jvm
    for part in package.split("."):
        owner = getattr(owner, part)
    return getattr(getattr(owner, f"{last}$"), "MODULE$")


def rendered(session: SparkSession, settings: dict[str, str]) -> dict[str, Any]:
    """The pod of executor 1 in a session with these settings, as Spark makes it."""
    jvm: Any = session._jvm
    conf = jvm.org.apache.spark.SparkConf(False)  # noqa: FBT003  # py4j knows no names
    for name, value in settings.items():
        conf.set(name, value)
    # As Spark's context does.
    modules = jvm.org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptions()
    conf.set("spark.executor.extraJavaOptions", f"{modules} {settings.get('spark.executor.extraJavaOptions', '')}")
    none = jvm.scala.Option.empty()
    kubernetes = jvm.io.fabric8.kubernetes.client
    client = kubernetes.KubernetesClientBuilder().withConfig(kubernetes.Config.empty()).build()
    security = module_of(jvm, "org.apache.spark.SecurityManager")
    secrets = jvm.org.apache.spark.SecurityManager(conf, none, getattr(security, "$lessinit$greater$default$3")())
    executor = jvm.org.apache.spark.deploy.k8s.KubernetesExecutorConf(conf, "spark-1", "1", none, 0)
    profile = module_of(jvm, "org.apache.spark.resource.ResourceProfile").getOrCreateDefaultProfile(conf)
    builder = jvm.org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBuilder()
    made = builder.buildFromFeatures(executor, secrets, client, profile).pod()
    pod, container = (
        yaml.safe_load(kubernetes.utils.Serialization.asYaml(one)) for one in (made.pod(), made.container())
    )
    pod["spec"].setdefault("containers", []).append(container)
    return dict(pod)


@pytest.fixture
def pod(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    fleet = fleet_in(driver_pods()["CronJob cutline-increment"], tmp_path, monkeypatch)
    template = tmp_path / "executor.yaml"
    template.write_text(TEMPLATE_FILE.read_text())
    given = dict(fleet.spark_settings) | {"spark.kubernetes.executor.podTemplateFile": str(template)}
    return rendered(spark, session_settings(fleet.spark_master, given, "create week-1", tmp_path, []))


def test_spark_makes_a_valid_pod_of_the_template(pod: dict[str, Any]) -> None:
    for release in RELEASES:
        kubernetes_validate.validate(copy.deepcopy(pod), release, strict=True)
    template = yaml.safe_load(TEMPLATE_FILE.read_text())
    for key in ("securityContext", "initContainers", "automountServiceAccountToken"):
        assert pod["spec"][key] == template["spec"][key]
    assert pod["spec"]["serviceAccountName"] == "cutline-executor"
    (container,) = pod["spec"]["containers"]
    (ours,) = template["spec"]["containers"]
    assert {key: container[key] for key in ("command", "workingDir", "securityContext")} == {
        key: ours[key] for key in ("command", "workingDir", "securityContext")
    }
    assert container["image"] == "registry.example.com/cutline:0.1.0"
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounts["/tmp"]["subPath"] == "tmp"
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    # All that is written goes to volumes of the pod.
    assert all(path in mounts for path in variables_of(pod)["SPARK_LOCAL_DIRS"].split(","))
    assert volumes[mounts["/etc/cutline"]["name"]]["secret"] == {"secretName": "cutline", "defaultMode": 0o444}


def variables_of(pod: dict[str, Any]) -> dict[str, str]:
    """The environment of the executor; what the pod's own address or name would be is left out."""
    return {one["name"]: one.get("value", "") for one in pod["spec"]["containers"][0]["env"] if "valueFrom" not in one}


def test_the_secret_of_the_session_is_not_in_the_pod(pod: dict[str, Any]) -> None:
    variables = variables_of(pod)
    assert "_SPARK_AUTH_SECRET" not in variables
    assert "-Dspark.authenticate.secret.file=/etc/cutline/spark" in variables.values()
    assert variables["SPARK_DRIVER_URL"].endswith("@increment.cutline-driver.cutline.svc:7078")


def options_changed(pod: dict[str, Any], settings: dict[str, str]) -> dict[str, str]:
    """The variables that give the executor's JVM these of Spark's settings in place of the pod's."""
    begins = {f"-Dspark.{name}=": value for name, value in settings.items()}
    found = {
        variable: begin + value
        for variable, given in variables_of(pod).items()
        for begin, value in begins.items()
        if given.startswith(begin)
    }
    assert len(found) == len(settings)
    return found


def run_pod(pod: dict[str, Any], changed: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Run the pod's program here, as a user without a name."""
    container = pod["spec"]["containers"][0]
    program, *words = [*container["command"], *container["args"]]
    assert program == "python3"
    with log.open("wb") as output:
        return subprocess.Popen(
            [*UNNAMED, sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            cwd=changed["TMPDIR"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | variables_of(pod) | changed,
        )  # fmt: skip


def can_lose_the_name() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNNAMED, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_lose_the_name(), reason="needs unshare(1) and namespaces of users")
def test_the_program_of_the_pod_runs_tasks_with_the_secret_in_a_file(pod: dict[str, Any], tmp_path: Path) -> None:
    # Spark takes a file's bytes, as base64, for the secret.
    in_file = uuid.uuid4().bytes
    secret = base64.b64encode(in_file).decode()
    given = {SECRET: secret, "spark.driver.host": "127.0.0.1", "spark.driver.memory": "1g"}
    with (
        standalone_master(tmp_path / "cluster", PROTECTION | {SECRET: secret}) as master,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, master], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as driver,
    ):  # fmt: skip
        place = tmp_path / "executor"
        place.mkdir()
        (place / "spark").write_bytes(in_file)
        try:
            assert driver.stdin is not None
            assert driver.stdout is not None
            driver.stdin.write(f"{json.dumps(given)}\n")
            driver.stdin.flush()
            port, application = driver.stdout.readline().split()
            changed = options_changed(pod, {"driver.port": port, "authenticate.secret.file": f"{place}/spark"}) | {
                "SPARK_DRIVER_URL": f"spark://CoarseGrainedScheduler@127.0.0.1:{port}",
                "SPARK_APPLICATION_ID": application,
                "SPARK_EXECUTOR_CORES": "1",
                "SPARK_EXECUTOR_MEMORY": "512m",
                "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
                "SPARK_EXECUTOR_POD_NAME": "here",
                "SPARK_LOCAL_DIRS": str(place),
                "TMPDIR": str(place),
            }
            executor = run_pod(pod, changed, tmp_path / "executor.log")
            # Without an executor the driver would wait for ever.
            threading.Thread(target=lambda: (executor.wait(), driver.kill()), daemon=True).start()
            try:
                assert driver.stdout.readline() == "2\n", (tmp_path / "executor.log").read_text()
            finally:
                executor.terminate()
                executor.wait(END_SECONDS_MAX)
        finally:
            # Its JVM ends with it.
            driver.kill()
