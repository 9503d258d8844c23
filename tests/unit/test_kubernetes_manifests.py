"""The manifests of docs/kubernetes, as kustomize renders them, are valid and agree with the fleet.toml among them."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cutline.fleet.config import Fleet, load_fleet
from cutline.spark import executor
from cutline.spark.settings import check_protection
from tests.integration.shown_commands import ShownCommand, parse
from tests.programs.lacking import lacking

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
FLEET_FILE = FOLDER / "base" / "fleet.toml"
TEMPLATE_FILE = FOLDER / "base" / "executor.yaml"
# The oldest release whose pods may have all that is used here, and the newest whose schemas are installed.
RELEASES = ("1.27", kubernetes_validate.latest_version())
# By jobs on a schedule, as a Deployment, one command.
WAYS = ("cron", "watch", "once")
EXECUTOR = yaml.safe_load(TEMPLATE_FILE.read_text())
SECRET_FILES = {"pgpass", "credentials", "spark", "ca.crt"}
RENDERER = (
    [program, "kustomize"] if (program := shutil.which("kubectl")) else [shutil.which("kustomize") or "", "build"]
)

pytestmark = pytest.mark.skipif(not RENDERER[0], reason=lacking("kubectl", "nor is kustomize on the PATH"))


@cache
def rendered(*ways: str) -> list[dict[str, Any]]:
    """What `kubectl apply --kustomize` applies, each once."""
    texts = [
        subprocess.run([*RENDERER, str(FOLDER / way)], capture_output=True, text=True, check=True).stdout
        for way in ways
    ]
    return list({name_of(one): one for text in texts for one in yaml.safe_load_all(text)}.values())


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def found(kind: str, name: str = "") -> dict[str, Any]:
    (one,) = [one for one in rendered(*WAYS) if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    return one


@cache
def driver_pods() -> dict[str, dict[str, Any]]:
    """The pods of commands, by the names of what makes them."""
    pods = {}
    for one in rendered(*WAYS):
        if one["kind"] == "CronJob":
            pods[name_of(one)] = one["spec"]["jobTemplate"]["spec"]["template"]
        elif one["kind"] in ("Job", "Deployment"):
            pods[name_of(one)] = one["spec"]["template"]
    return pods


def all_pods() -> list[dict[str, Any]]:
    return [*driver_pods().values(), EXECUTOR]


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
    (folder / "fleet.toml").write_text(found("ConfigMap")["data"]["fleet.toml"])
    return load_fleet(folder / "fleet.toml")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("way", [*WAYS, "executor"])
def test_every_manifest_is_valid(way: str, release: str) -> None:
    for manifest in [EXECUTOR] if way == "executor" else rendered(way):
        complete = copy.deepcopy(manifest)
        if manifest is EXECUTOR:
            # Spark adds the image.
            complete["spec"]["containers"][0]["image"] = "x"
        kubernetes_validate.validate(complete, release, strict=True)


def test_a_misspelt_key_would_be_noticed() -> None:
    wrong = copy.deepcopy(found("CronJob", "cutline-increment"))
    wrong["spec"]["concurrencyPolicies"] = "Forbid"
    with pytest.raises(kubernetes_validate.ValidationError, match="concurrencyPolicies"):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_what_is_made_of_files_has_their_bytes() -> None:
    assert found("ConfigMap")["data"] == {one.name: one.read_text() for one in (FLEET_FILE, TEMPLATE_FILE)}


def test_jobs_on_a_schedule_never_run_twice_at_a_time_end_in_time_and_do_not_stay() -> None:
    jobs = [one for one in rendered("cron") if one["kind"] == "CronJob"]
    assert {one["metadata"]["name"].removeprefix("cutline-") for one in jobs} == {
        "full", "increment", "check", "prune", "gc",
    }  # fmt: skip
    for one in jobs:
        spec = one["spec"]["jobTemplate"]["spec"]
        assert (one["spec"]["concurrencyPolicy"], spec["backoffLimit"]) == ("Forbid", 0)
        assert 3600 <= spec["activeDeadlineSeconds"] < 24 * 3600
        assert spec["ttlSecondsAfterFinished"] == 7 * 24 * 3600
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
    # A watch checks, prunes and removes garbage by itself.
    assert [one["metadata"]["name"] for one in rendered("watch") if one["kind"] == "CronJob"] == []


def test_every_command_is_one() -> None:
    for pod in driver_pods().values():
        (container,) = pod["spec"]["containers"]
        parse(ShownCommand("docs/kubernetes", " ".join(["snapshot", *container["args"]])))


def test_every_container_is_closed_runs_as_any_user_and_says_what_it_needs() -> None:
    for pod in all_pods():
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
            # A quota rejects pods of which one container says nothing; Spark says it for the executor's.
            if container["name"] != "executor":
                assert {kind: {*amounts} for kind, amounts in container["resources"].items()} == {
                    "requests": {"cpu", "memory"},
                    "limits": {"cpu", "memory"},
                }
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        (temporary,) = [one for one in containers_of(pod)[-1]["volumeMounts"] if one["mountPath"] == "/tmp"]
        assert volumes[temporary["name"]]["emptyDir"] == {}
        # An emptyDir is everybody's, and Cutline keeps no files where others can replace them.
        assert containers_of(pod)[0]["command"][-1] == f"/own/{temporary['subPath']}/pgpass"
        (files,) = [one for one in volumes.values() if one["name"] == "cutline"]
        assert (files.get("projected") or files["secret"])["defaultMode"] == 0o444


def test_no_pod_is_moved_to_another_machine_while_it_works() -> None:
    for pod in all_pods():
        assert pod["metadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }


def test_secrets_are_files_and_in_no_environment() -> None:
    for pod in all_pods():
        for container in containers_of(pod):
            for one in container.get("env", []):
                assert one.get("valueFrom", {}).keys() <= {"fieldRef"}
            assert "envFrom" not in container
    assert "Secret" not in {one["kind"] for one in rendered(*WAYS)}


def test_the_command_and_its_executors_run_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {one["image"] for pod in all_pods() for one in containers_of(pod) if "image" in one}
    settings = fleet_in(driver_pods()["Job cutline-once"], tmp_path, monkeypatch).spark_settings
    assert images == {settings["spark.kubernetes.container.image"]}
    (tag,) = re.findall(r"--tag (\S+)", (FOLDER / "Dockerfile").read_text())
    assert images == {tag}
    assert containers_of(EXECUTOR)[-1]["command"][-2:] == ["-m", executor.__name__]


def test_names_ports_and_paths_of_the_manifests_are_those_of_the_fleet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod in driver_pods().values():
        check_names(pod, fleet_in(pod, tmp_path, monkeypatch))


def check_names(pod: dict[str, Any], fleet: Fleet) -> None:
    service, config = found("Service"), found("ConfigMap")["data"]
    settings = fleet.spark_settings
    check_protection(fleet.spark_master, settings)
    namespace = found("Namespace")["metadata"]["name"]
    assert {one["metadata"].get("namespace", namespace) for one in rendered(*WAYS)} == {namespace}
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
    accounts = {one["metadata"]["name"] for one in rendered(*WAYS) if one["kind"] == "ServiceAccount"}
    executors = settings["spark.kubernetes.authenticate.executor.serviceAccountName"]
    assert {pod["spec"]["serviceAccountName"], executors} == accounts
    (subject,) = found("RoleBinding")["subjects"]
    assert subject["name"] == pod["spec"]["serviceAccountName"] != executors
    assert found("RoleBinding")["roleRef"]["name"] == found("Role")["metadata"]["name"]
    environment = environment_of(containers_of(pod)[-1])
    template = Path(settings["spark.kubernetes.executor.podTemplateFile"])
    assert environment["SNAPSHOT_FLEET"] == "/etc/cutline/fleet.toml"
    assert {"fleet.toml", template.name} == config.keys()
    texts = [config["fleet.toml"], *environment.values(), *containers_of(pod)[0]["command"]]
    named = {Path(path).name for text in texts for path in re.findall(r"/etc/cutline/[\w.]+", text)}
    assert named == SECRET_FILES | config.keys()
    assert environment["PGPASSFILE"] == "/tmp/pgpass"
    assert settings["spark.executorEnv.AWS_SHARED_CREDENTIALS_FILE"] == environment["AWS_SHARED_CREDENTIALS_FILE"]


def test_policies_let_in_executors_and_who_asks_for_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = driver_pods()["Deployment cutline-watch"]
    fleet = fleet_in(watch, tmp_path, monkeypatch)
    labels = {"driver": watch["metadata"]["labels"], "executor": EXECUTOR["metadata"]["labels"]}
    ports: dict[tuple[str, str], set[int | str]] = {}
    for policy in (one["spec"] for one in rendered("watch") if one["kind"] == "NetworkPolicy"):
        (rule,) = policy["ingress"]
        for to, those in labels.items():
            if policy["podSelector"]["matchLabels"].items() <= those.items():
                peers = rule.get("from", [{"podSelector": {"matchLabels": {}}}])
                for who, theirs in {**labels, "others": {}}.items():
                    if any(one["podSelector"]["matchLabels"].items() <= theirs.items() for one in peers):
                        allowed = {one["port"] for one in rule.get("ports", [{"port": "any"}])}
                        ports[who, to] = ports.get((who, to), set()) | allowed
    assert ports == {
        ("executor", "driver"): {7078, 7079, "metrics"},
        ("executor", "executor"): {"any"},
        ("driver", "executor"): {"any"},
        ("driver", "driver"): {"metrics"},
        ("others", "driver"): {"metrics"},
    }
    assert fleet.metrics.listen is not None
    (container,) = watch["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": fleet.metrics.listen.port}]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    (monitor,) = yaml.safe_load_all((FOLDER / "pod-monitor" / "pod-monitor.yaml").read_text())
    assert monitor["spec"]["selector"]["matchLabels"].items() <= watch["metadata"]["labels"].items()
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    # The rules match up by the job that the operator takes from this label of the pods.
    job = watch["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert set(re.findall(r'job="(.+?)"', (FOLDER.parent / "monitoring" / "alerts.yml").read_text())) == {job}


def test_hosts_of_drivers_differ_and_each_name_is_one_pod() -> None:
    assert len({pod["spec"]["hostname"] for pod in driver_pods().values()}) == len(driver_pods())
    assert found("Job")["metadata"]["name"], "a drawn name would let two pods have the name of one host"


def test_all_pods_of_commands_are_the_same_but_for_their_commands_and_hosts() -> None:
    pods = [copy.deepcopy(pod) for pod in driver_pods().values()]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        for key in ("args", "ports", "startupProbe", "livenessProbe"):
            container.pop(key, None)
        container["env"] = [one for one in container["env"] if one["name"] != "DRIVER_HOST"]
        del pod["spec"]["hostname"]
        # A Deployment's pods are started again whenever they end.
        pod["spec"].pop("restartPolicy", None)
        pod["metadata"]["labels"].pop("app.kubernetes.io/instance", None)
    assert all(pod == pods[0] for pod in pods)
