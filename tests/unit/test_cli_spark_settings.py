"""The settings that Spark is started with; no test here starts it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from cutline.fleet.config import runs_on_this_machine
from cutline.fleet.cores import cores_of
from cutline.spark import class_archive, start
from cutline.spark.class_archive import archive_options, is_recording
from cutline.spark.java import Java
from cutline.spark.settings import (
    CLASS_PATH_VARIABLES,
    added_to_class_path,
    driver_memory_bytes,
    jvm_options,
    session_settings,
    set_environment,
    with_retries,
)
from cutline.spark.start import _keep_text


def test_a_machine_without_a_loopback_of_ipv4_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start.check_loopback()
    # An address for documentation, which no machine has.
    monkeypatch.setattr(start, "LOOPBACK", "192.0.2.1")
    with pytest.raises(start.NoLoopbackError, match=r"over 192\.0\.2\.1, which this machine doesn't have: ") as raised:
        start.check_loopback()
    assert raised.value.exit_code == 3


def test_errors_that_cause_each_other_keep_their_text_without_end() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    _keep_text(first)


@pytest.mark.parametrize(
    ("master", "here", "cores"),
    [
        ("local", True, 1),
        ("local[3]", True, 3),
        ("local[4,2]", True, 4),
        ("local-cluster[2,3,1024]", True, None),
        ("spark://localhost:7077", False, None),
        ("k8s://https://x", False, None),
    ],
)
def test_a_master_determines_where_tasks_run_and_how_many(master: str, here: bool, cores: int | None) -> None:  # noqa: FBT001  # a parameter of the case
    assert runs_on_this_machine(master) is here
    assert cores_of(master) == cores


@pytest.mark.parametrize(
    ("master", "retrying"),
    [
        ("local", "local[1,4]"),
        ("local[*]", "local[*,4]"),
        ("local[4,2]", "local[4,2]"),
        ("local-cluster[2,3,1024]", "local-cluster[2,3,1024]"),
        ("spark://localhost:7077", "spark://localhost:7077"),
    ],
)
def test_a_local_master_retries_tasks_as_a_cluster_does(master: str, retrying: str) -> None:
    assert with_retries(master) == retrying


def test_the_fleet_file_overrides_settings_but_adds_to_java_options(tmp_path: Path) -> None:
    configured = {"spark.driver.memory": "3g", "spark.driver.extraJavaOptions": "-Dx=1", "spark.y": "z"}
    settings = session_settings("local[2]", configured, "check", tmp_path, ["-Xlog:disable"])
    assert settings["spark.driver.memory"] == "3g"
    assert settings["spark.y"] == "z"
    assert settings["spark.driver.extraJavaOptions"] == "-Xlog:disable -Dx=1"
    assert settings["spark.sql.session.timeZone"] == "UTC"


def test_folders_may_have_any_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    temporary, home = tmp_path / "a b'c\"d\\e", tmp_path / "java"
    cache, jars = tmp_path / 'John\'s "cache"', tmp_path / "spark" / "jars"
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").touch()
    for folder in (temporary, cache, jars):
        folder.mkdir(parents=True)
    monkeypatch.setattr(class_archive, "cache_folder", lambda: cache)
    archive = archive_options(Java(home, home, "17.0.1"), tmp_path / "spark", "4.3.0")
    options = [*archive, *jvm_options(temporary, runs_tasks=True, is_brief=False)]
    settings = session_settings("local[2]", {}, "check", temporary, options)
    words = shlex.split(settings["spark.driver.extraJavaOptions"])
    assert words == options, "each option is one argument of the JVM: the first that is none is taken for its class"
    assert all(word.startswith("-") for word in words)
    assert f"-Djava.io.tmpdir={temporary}" in words
    assert f"-Djava.io.tmpdir={temporary}" in shlex.split(settings["spark.executor.extraJavaOptions"])


def test_only_a_local_master_is_bound_to_this_machine(tmp_path: Path) -> None:
    assert session_settings("local[2]", {}, "x", tmp_path, [])["spark.driver.host"] == "127.0.0.1"
    remote = session_settings("yarn", {}, "x", tmp_path, [])
    assert not {"spark.driver.host", "spark.local.dir", "spark.executorEnv.PYTHONPATH"} & set(remote)


def test_executors_on_this_machine_have_the_settings_of_a_cluster_but_for_places(tmp_path: Path) -> None:
    given = {"spark.authenticate.secret": "of the cluster"}
    here, there = (
        session_settings(master, given, "x", tmp_path, []) for master in ("local-cluster[2,1,1024]", "spark://m:7077")
    )
    places = {
        "spark.master", "spark.driver.host", "spark.driver.bindAddress", "spark.local.dir",
        "spark.executor.extraJavaOptions", "spark.executorEnv.PYTHONPATH", "spark.executorEnv.PYTHONSAFEPATH",
    }  # fmt: skip
    assert {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)} == places


def test_what_changes_the_class_path_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLASS_PATH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    given = {"spark.driver.extraClassPath": "/a.jar", "spark.driver.memory": "1g"}
    # On this machine, the variables are dropped.
    assert added_to_class_path("local[2]", given) == "/a.jar"
    assert added_to_class_path("local[2]", {}) == ""
    assert added_to_class_path("yarn", {}) == "/etc/hadoop"


@pytest.mark.parametrize(
    ("master", "length", "is_used"),
    [
        ("local[2]", 60, True),
        ("local-cluster[2,1,1024]", 60, False),
        ("local[2]", 61, False),
        ("yarn", 60, False),
    ],
)
def test_workers_are_reached_by_unix_sockets_where_the_path_is_short_enough(
    master: str,
    length: int,
    is_used: bool,  # noqa: FBT001  # a parameter of the case
) -> None:
    folder = Path("/" + "t" * (length - 3) + "ü")
    settings = session_settings(master, {}, "x", folder, [])
    assert settings.get("spark.python.unix.domain.socket.dir") == (str(folder) if is_used else None)
    assert settings.get("spark.python.unix.domain.socket.enabled") == ("true" if is_used else None)


def test_the_drivers_memory_is_within_bounds() -> None:
    assert 1024**3 <= driver_memory_bytes() <= 8 * 1024**3


def test_a_class_archive_is_recorded_once_then_used_but_never_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, spark_home, cache = tmp_path / "java", tmp_path / "spark", tmp_path / "cache"
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").touch()
    (spark_home / "jars").mkdir(parents=True)
    cache.mkdir()
    java = Java(home, home, "17.0.1")
    monkeypatch.setattr(class_archive, "cache_folder", lambda: cache)
    options = archive_options(java, spark_home, "4.3.0")
    assert is_recording(options)
    assert archive_options(java, spark_home, "4.3.0", "/more.jar") != options, (
        "a JVM with another class path ignores it"
    )
    archive = Path(options[0].partition("=")[2])
    archive.write_bytes(b"\0" * 100)
    assert archive_options(java, spark_home, "4.3.0") == []
    archive.write_bytes(b"\xa8\x0b\x0b\xf0")
    assert is_recording(archive_options(java, spark_home, "4.3.0")), "the JVM that wrote it was killed before any job"
    assert not archive.exists()
    archive.write_bytes(b"\xa8\x0b\x0b\xf0")
    os.truncate(archive, class_archive.ARCHIVE_BYTES_MIN)
    assert archive_options(java, spark_home, "4.3.0") == [f"-XX:SharedArchiveFile={archive}"]
    for unsuitable in (None, tmp_path / "a:b"):
        monkeypatch.setattr(class_archive, "cache_folder", lambda folder=unsuitable: folder)
        assert archive_options(java, spark_home, "4.3.0") == []


@pytest.mark.parametrize(
    ("master", "given", "inherited", "chosen"),
    [
        ("spark://m:7077", {"spark.pyspark.python": "/opt/a"}, "/opt/b", "/opt/a"),
        ("spark://m:7077", {}, "/opt/b", "/opt/b"),
        ("spark://m:7077", {}, "", sys.executable),
        # There the workers are this machine's.
        ("local[*]", {"spark.pyspark.python": "/opt/a"}, "/opt/b", sys.executable),
    ],
)
def test_the_workers_of_a_cluster_have_the_python_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch, master: str, given: dict[str, str], inherited: str, chosen: str
) -> None:
    for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_LOCAL_IP", "SPARK_LAUNCHER_OPTS", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PYSPARK_PYTHON", inherited)
    set_environment(master, given, Java(Path("/java"), Path("/java"), "17"), Path("/spark"))
    assert (os.environ["PYSPARK_PYTHON"], os.environ["PYSPARK_DRIVER_PYTHON"]) == (chosen, sys.executable)
