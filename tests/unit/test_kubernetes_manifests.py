"""The manifests of docs/kubernetes are valid, agree with each other and with the fleet.toml that they contain."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cli.spark import executor
from cli.spark.protection import check_protection
from fleet.config import Fleet, load_fleet
from tests.integration.shown_commands import ShownCommand, parse

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
# The oldest release whose pods may have all that is used here, and the newest whose schemas are installed.
RELEASES = ("1.27", kubernetes_validate.latest_version())
MANIFESTS = [
    manifest
    for file in ("cutline.yaml", "job.yaml", "watch.yaml")
    for manifest in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))
]
CONFIG = next(one for one in MANIFESTS if one["kind"] == "ConfigMap")
EXECUTOR = yaml.safe_load(CONFIG["data"]["executor.yaml"])
SECRET_FILES = {"pgpass", "credentials", "spark", "ca.crt"}


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata'].get('name', 'executor')}"


def found(kind: str) -> dict[str, Any]:
    (one,) = [one for one in MANIFESTS if one["kind"] == kind]
    return one


def driver_pods() -> dict[str, dict[str, Any]]:
    return {
        "CronJob": found("CronJob")["spec"]["jobTemplate"]["spec"]["template"],
        "Job": found("Job")["spec"]["template"],
        "Deployment": found("Deployment")["spec"]["template"],
    }


PODS = [*driver_pods().values(), EXECUTOR]


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


def environment_of(container: dict[str, Any], pod_name: str = "a-pod") -> dict[str, str]:
    fields = {"metadata.name": pod_name}
    return {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container.get("env", [])
    }


def fleet_in(pod: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """The fleet as the command in this pod reads it."""
    for name, value in environment_of(containers_of(pod)[-1]).items():
        monkeypatch.setenv(name, value)
    (folder / "fleet.toml").write_text(CONFIG["data"]["fleet.toml"])
    return load_fleet(folder / "fleet.toml")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("manifest", [*MANIFESTS, EXECUTOR], ids=name_of)
def test_every_manifest_is_valid(manifest: dict[str, Any], release: str) -> None:
    complete = copy.deepcopy(manifest)
    if manifest is EXECUTOR:
        # Spark adds the image.
        complete["spec"]["containers"][0]["image"] = "x"
    kubernetes_validate.validate(complete, release, strict=True)


def test_a_misspelt_key_would_be_noticed() -> None:
    wrong = copy.deepcopy(found("CronJob"))
    wrong["spec"]["concurrencyPolicies"] = "Forbid"
    with pytest.raises(kubernetes_validate.ValidationError, match="concurrencyPolicies"):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_the_cron_job_takes_an_increment_and_then_checks_and_never_twice_at_a_time() -> None:
    spec, pod = found("CronJob")["spec"], driver_pods()["CronJob"]
    assert (spec["concurrencyPolicy"], spec["jobTemplate"]["spec"]["backoffLimit"]) == ("Forbid", 0)
    assert pod["spec"]["restartPolicy"] == "Never"
    commands = [one["args"] for one in containers_of(pod) if "args" in one]
    assert [words[0] for words in commands] == ["create", "check"]
    assert "--incremental" in commands[0]
    for words in (*commands, *(containers_of(driver_pods()[kind])[-1]["args"] for kind in ("Job", "Deployment"))):
        parse(ShownCommand("cutline.yaml", " ".join(["snapshot", *words])))


@pytest.mark.parametrize("pod", PODS, ids=[*driver_pods(), "executor"])
def test_every_container_is_closed_and_runs_as_any_user(pod: dict[str, Any]) -> None:
    security = pod["spec"]["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for container in containers_of(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        words = [*container.get("command", []), *container.get("args", [])]
        assert not {"sh", "bash", "-c"} & set(words)
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    (temporary,) = [one for one in containers_of(pod)[-1]["volumeMounts"] if one["mountPath"] == "/tmp"]
    assert volumes[temporary["name"]]["emptyDir"] == {}
    # An emptyDir is everybody's, and Cutline keeps no files where others can replace them; what `install` makes is not.
    assert containers_of(pod)[0]["command"][-1] == f"/own/{temporary['subPath']}/pgpass"
    (files,) = [one for one in volumes.values() if one["name"] == "cutline"]
    assert (files.get("projected") or files["secret"])["defaultMode"] == 0o444


def test_secrets_are_files_and_in_no_environment() -> None:
    for pod in PODS:
        for container in containers_of(pod):
            for one in container.get("env", []):
                assert one.get("valueFrom", {}).keys() <= {"fieldRef"}
            assert "envFrom" not in container
    assert "Secret" not in {one["kind"] for one in MANIFESTS}


def test_the_command_and_its_executors_run_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {one["image"] for pod in PODS for one in containers_of(pod) if "image" in one}
    settings = fleet_in(driver_pods()["Job"], tmp_path, monkeypatch).spark_settings
    assert images == {settings["spark.kubernetes.container.image"]}
    (tag,) = re.findall(r"--tag (\S+)", (FOLDER / "Dockerfile").read_text())
    assert images == {tag}
    assert containers_of(EXECUTOR)[-1]["command"][-2:] == ["-m", executor.__name__]


@pytest.mark.parametrize("kind", driver_pods())
def test_names_ports_and_paths_of_the_manifests_are_those_of_the_fleet_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, service = driver_pods()[kind], found("Service")
    fleet = fleet_in(pod, tmp_path, monkeypatch)
    settings = fleet.spark_settings
    check_protection(fleet.spark_master, settings)
    namespace = found("Namespace")["metadata"]["name"]
    assert {one["metadata"].get("namespace", namespace) for one in MANIFESTS} == {namespace}
    assert settings["spark.kubernetes.namespace"] == namespace
    assert settings["spark.kubernetes.driver.pod.name"] == "a-pod"
    # The name of a pod's host below that of a service without an address.
    host, subdomain = pod["spec"]["hostname"], pod["spec"]["subdomain"]
    assert settings["spark.driver.host"] == f"{host}.{subdomain}.{namespace}.svc"
    assert (subdomain, service["spec"]["clusterIP"]) == (service["metadata"]["name"], "None")
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= EXECUTOR["metadata"]["labels"].items()
    ports = {str(one["port"]) for one in service["spec"]["ports"]}
    assert ports == {settings["spark.driver.port"], settings["spark.driver.blockManager.port"]}
    accounts = {one["metadata"]["name"] for one in MANIFESTS if one["kind"] == "ServiceAccount"}
    executors = settings["spark.kubernetes.authenticate.executor.serviceAccountName"]
    assert {pod["spec"]["serviceAccountName"], executors} == accounts
    (subject,) = found("RoleBinding")["subjects"]
    assert subject["name"] == pod["spec"]["serviceAccountName"] != executors
    assert found("RoleBinding")["roleRef"]["name"] == found("Role")["metadata"]["name"]
    environment = environment_of(containers_of(pod)[-1])
    template = Path(settings["spark.kubernetes.executor.podTemplateFile"])
    assert environment["SNAPSHOT_FLEET"] == "/etc/cutline/fleet.toml"
    assert {"fleet.toml", template.name} == CONFIG["data"].keys()
    texts = [CONFIG["data"]["fleet.toml"], *environment.values(), *containers_of(pod)[0]["command"]]
    named = {Path(path).name for text in texts for path in re.findall(r"/etc/cutline/[\w.]+", text)}
    assert named == SECRET_FILES | CONFIG["data"].keys()
    assert environment["PGPASSFILE"] == "/tmp/pgpass"
    assert settings["spark.executorEnv.AWS_SHARED_CREDENTIALS_FILE"] == environment["AWS_SHARED_CREDENTIALS_FILE"]


def test_hosts_of_drivers_differ_and_each_name_is_one_pod() -> None:
    assert len({pod["spec"]["hostname"] for pod in driver_pods().values()}) == len(driver_pods())
    assert found("Job")["metadata"]["name"], "a drawn name would let two pods have the name of one host"


def test_all_pods_of_commands_are_the_same_but_for_their_commands_and_hosts() -> None:
    cron, job, watch = (copy.deepcopy(pod) for pod in driver_pods().values())
    create = cron["spec"]["initContainers"].pop()
    containers = [*(pod["spec"]["containers"][0] for pod in (cron, job, watch)), create]
    for one in containers:
        del one["args"], one["name"]
        one["env"] = [variable for variable in one["env"] if variable["name"] != "DRIVER_HOST"]
    assert create == containers[0]
    for pod in (cron, job, watch):
        del pod["spec"]["hostname"]
    # A Deployment's pods are started again whenever they end.
    del cron["spec"]["restartPolicy"], job["spec"]["restartPolicy"]
    assert watch["metadata"]["labels"].pop("app.kubernetes.io/instance") == "watch"
    assert cron == job == watch
