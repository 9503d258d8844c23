"""Which settings a session is refused with, and where its secrets are written; no test here starts Spark."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

import cutline.cli.main
from cutline.spark.settings import (
    SECRET,
    SUBMIT_ARGUMENTS,
    SparkUnprotectedError,
    check_protection,
    in_private_file,
    session_settings,
    with_private_options,
)
from cutline.storage.errors import redact

STANDALONE, KUBERNETES, HERE = "spark://m:7077", "k8s://https://x", "local-cluster[2,1,1024]"
GIVEN = {SECRET: "the secret of the cluster"}


@pytest.mark.parametrize(
    "unsafe",
    [
        {"spark.authenticate": "false"},
        {"spark.network.crypto.enabled": "False"},
        {"spark.network.crypto.saslFallback": "true"},
        {"spark.io.encryption.enabled": "false"},
        {"spark.ui.enabled": "true"},
        {"spark.authenticate": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("master", [STANDALONE, KUBERNETES, "yarn", HERE])
def test_no_setting_switches_protection_off_on_a_cluster(master: str, unsafe: Mapping[str, str]) -> None:
    with pytest.raises(SparkUnprotectedError, match=next(iter(unsafe))) as raised:
        session_settings(master, GIVEN | unsafe, "x", Path("/t"), [])
    assert raised.value.exit_code == 2
    check_protection("local[2]", unsafe)


def test_a_standalone_cluster_needs_its_secret_and_others_make_their_own(tmp_path: Path) -> None:
    with pytest.raises(SparkUnprotectedError, match=r"spark\.authenticate\.secret is not set for spark://m:7077"):
        check_protection(STANDALONE, {})
    for master in (KUBERNETES, "yarn"):
        assert SECRET not in session_settings(master, {}, "x", tmp_path, [])


@pytest.mark.parametrize("master", [STANDALONE, KUBERNETES, "yarn", HERE])
def test_a_cluster_authenticates_and_encrypts_unless_it_is_told_to(master: str, tmp_path: Path) -> None:
    settings = session_settings(master, GIVEN, "x", tmp_path, [])
    assert settings["spark.authenticate"] == settings["spark.network.crypto.enabled"] == "true"
    assert settings["spark.network.crypto.cipher"] == "AES/GCM/NoPadding"
    assert settings["spark.io.encryption.enabled"] == "true"
    assert settings["spark.network.crypto.saslFallback"] == settings["spark.ui.enabled"] == "false"


def test_the_secret_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    given = {"spark.authenticate.secret.file": str(file)}
    monkeypatch.setattr("cutline.storage.errors._secrets", set())
    with pytest.raises(SparkUnprotectedError, match="can't be read: No such file"):
        session_settings(STANDALONE, given, "x", tmp_path, [])
    file.write_text(" \n")
    with pytest.raises(SparkUnprotectedError, match="is empty"):
        session_settings(STANDALONE, given, "x", tmp_path, [])
    file.write_text("of the cluster\n")
    assert session_settings(STANDALONE, given, "x", tmp_path, [])[SECRET] == "of the cluster"
    assert redact("the secret of the cluster") == "the secret ***"


def test_two_sessions_on_this_machine_have_different_secrets(tmp_path: Path) -> None:
    drawn = {session_settings("local-cluster[2,1,1024]", {}, "x", tmp_path, [])[SECRET] for _ in range(2)}
    assert len(drawn) == 2
    assert all(len(secret) == 64 for secret in drawn)


@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", STANDALONE])
@pytest.mark.parametrize(
    "options",
    [
        "-Djavax.net.ssl.trustStorePassword=abcd",
        "-Xss1m '-Dmy.password=x abcd'",
        "-Dmy.token=/abcd==",
        "-Dmy.passwordFile=abcd",
        "-Dmy.arguments=--password=abcd",
        "-javaagent:/agent.jar=token=abcd",
        "-Dmy.secret=abcd '",
    ],
)
def test_a_secret_for_the_command_line_of_executors_is_refused_and_not_shown(master: str, options: str) -> None:
    given = GIVEN | {"spark.executor.extraJavaOptions": options}
    with pytest.raises(SparkUnprotectedError) as raised:
        check_protection(master, given)
    assert "abcd" not in f"{raised.value.message} {raised.value.hint} {raised.value.details}"


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]", STANDALONE])
@pytest.mark.parametrize(
    "options",
    [
        "-Djavax.net.ssl.trustStore=/etc/secrets/ts.jks",
        "-Djavax.net.ssl.trustStorePasswordFile=/etc/pw",
        "@/var/run/secrets/executor.args",
    ],
)
def test_options_that_name_a_file_with_a_secret_are_accepted(master: str, options: str) -> None:
    check_protection(master, GIVEN | {"spark.executor.extraJavaOptions": f"-Xss1m {options}"})


@pytest.mark.parametrize("command", [["init"], ["create", "daily"], ["check"], ["restore", "daily"]])
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("", "spark.authenticate.secret is not set for spark://m:7077"),
        ('authenticate.secret.file = "MISSING"', "can't be read: No such file"),
        ('authenticate.secret.file = "EMPTY"', "is empty"),
    ],
    ids=["none", "missing", "empty"],
)
def test_commands_refuse_an_unprotected_cluster_before_anything_else(
    command: list[str], setting: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, empty = tmp_path / "store", tmp_path / "empty"
    empty.touch()
    setting = setting.replace("MISSING", str(tmp_path / "missing")).replace("EMPTY", str(empty))
    (tmp_path / "fleet.toml").write_text(
        f'name = "f"\nstore = "{store}"\n[spark]\nmaster = "{STANDALONE}"\n{setting}\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 user=u"\n'
    )
    code = cutline.cli.main.run(["--fleet", str(tmp_path / "fleet.toml"), *command])
    assert (code, store.exists()) == (2, False)
    assert reason in capsys.readouterr().err


def test_settings_are_written_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUBMIT_ARGUMENTS, "--jars x.jar pyspark-shell")
    with in_private_file({"spark.a b": " one\\two\nthree"}, tmp_path):
        file = tmp_path / "spark.properties"
        assert os.environ[SUBMIT_ARGUMENTS].startswith(f"--properties-file {file} ")
        assert os.environ[SUBMIT_ARGUMENTS].endswith("--jars x.jar pyspark-shell")
    assert os.environ[SUBMIT_ARGUMENTS] == "--jars x.jar pyspark-shell"
    assert file.read_text() == "spark.a\\ b=\\ one\\\\two\\nthree\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_options_of_the_driver_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    assert with_private_options({"spark.x": "y"}, folder) == {"spark.x": "y"}
    secretive = {"spark.driver.extraJavaOptions": "-Dx.password='a \"b\\' -Dy=2"}
    changed = with_private_options(secretive, folder)
    (option,) = shlex.split(changed["spark.driver.extraJavaOptions"])
    file = Path(option.removeprefix("@"))
    assert file.read_text() == '"-Dx.password=a \\"b\\\\"\n"-Dy=2"\n'
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("command", "needs_it"),
    [(["init"], False), (["list"], False), (["status"], False), (["create", "daily"], True), (["check"], True)],
)
def test_only_commands_that_may_start_spark_need_the_variables_of_its_settings(
    command: list[str],
    needs_it: bool,  # noqa: FBT001  # a parameter of the case
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPARK_SECRET", raising=False)
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        f'name = "f"\nstore = "{tmp_path}/store"\n[spark]\nmaster = "{STANDALONE}"\n'
        'authenticate.secret = "${SPARK_SECRET}"\n[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 user=u"\n'
    )
    code = cutline.cli.main.run(["--fleet", str(fleet), *command])
    said = "error: {}: spark.authenticate.secret uses ${{SPARK_SECRET}}, which is not set in the environment"
    assert (said.format(fleet) in capsys.readouterr().err) is needs_it
    assert (code == 2) is needs_it
