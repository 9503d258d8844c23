"""Spark's configuration: the session's settings and their protection, the JVM's options, and the environment.

Settings in the [spark] table of fleet.toml override the settings chosen here. pyspark puts settings on the command
lines of a shell and two JVMs, which every user on the machine can read, so secrets are passed in private files.

A driver listens even if everything runs on one machine, where other users could connect to it, so authentication is
always on. A cluster also communicates over a network and writes to the disks of other machines. So no protection can be
disabled there, or with a `local-cluster`, which imitates a cluster. Spark's manual describes the processes of a cluster
("Security"). Nothing here starts a process.
"""

from __future__ import annotations

import contextlib
import locale
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import cutline
from cutline.columns import allocator
from cutline.fleet.config import JAVA_OPTIONS, has_executors, runs_on_this_machine, secrets_in_options
from cutline.fleet.cores import cores_of
from cutline.fleet.own_process import is_unnamed_user
from cutline.spark.java import Java
from cutline.storage.errors import UsageError, remember_secret

SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
DRIVER_JAVA_OPTIONS = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions")


@contextmanager
def in_private_file(settings: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Make a JVM that is launched in the block read `settings` from a private file in `folder`."""
    file = folder / "spark.properties"
    lines = [f"{_escaped(name, of_name=True)}={_escaped(value)}\n" for name, value in settings.items()]
    write_private(file, "".join(lines))
    before = os.environ.get(SUBMIT_ARGUMENTS)
    # A properties file replaces the defaults of the Spark installation unless they are requested.
    ours = f"--properties-file {shlex.quote(str(file))} --load-spark-defaults"
    os.environ[SUBMIT_ARGUMENTS] = f"{ours} {before or 'pyspark-shell'}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SUBMIT_ARGUMENTS]
        else:
            os.environ[SUBMIT_ARGUMENTS] = before


def with_private_options(settings: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `settings` with the driver's JVM options moved to a private file that java reads.

    All options are moved, because their names don't reliably show which are secret.
    """
    changed = dict(settings)
    for name in DRIVER_JAVA_OPTIONS:
        if settings.get(name):
            file = folder / f"{name}.txt"
            write_arguments(file, shlex.split(settings[name]))
            changed[name] = shlex.quote(f"@{file}")
    return changed


def write_arguments(file: Path, words: Iterable[str]) -> None:
    """Write a private file of arguments for java (@FILE)."""
    escaped = (word.replace("\\", "\\\\").replace('"', '\\"') for word in words)
    write_private(file, "".join(f'"{word}"\n' for word in escaped))


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read, even while it is being written."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)


def _escaped(text: str, *, of_name: bool = False) -> str:
    """Escape `text` for a Java properties file. Source: the documentation of java.util.Properties."""
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"), ("\f", "\\f")):
        text = text.replace(plain, escaped)
    for mark in "=: #!" if of_name else "":
        text = text.replace(mark, f"\\{mark}")
    return text if of_name or not text[:1].isspace() else f"\\{text}"


AUTHENTICATE = "spark.authenticate"
SECRET = "spark.authenticate.secret"
SECRET_FILE = "spark.authenticate.secret.file"
# Masters that give every session its own secret.
MAKE_SECRETS = ("k8s://", "yarn")
# Version 2 derives keys securely, and GCM detects altered bytes. For compatibility with old peers, Spark's defaults do
# neither.
PROTECTION = {
    AUTHENTICATE: "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}
# Settings that fleet.toml may not change if there are executors. Spark's web pages are off because they don't ask for a
# password.
REQUIRED_ON_A_CLUSTER = {
    AUTHENTICATE: "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
    "spark.ui.enabled": "false",
}


class SparkUnprotectedError(UsageError):
    """The settings in [spark] would reveal a secret, or let other users on the network read or join the session."""


def check_protection(master: str, given: Mapping[str, str]) -> None:
    """Raise SparkUnprotectedError if `given`, the settings from fleet.toml, leave a session at `master` unprotected."""
    for name, value in given.items():
        is_shown = name.endswith(JAVA_OPTIONS) and not name.startswith("spark.driver.")
        if is_shown and any(secrets_in_options(value)):
            raise SparkUnprotectedError(
                f"{name} seems to contain a secret, which Spark would put on a command line",
                hint="put the option into a file on the executors' machines, and refer to the file: @/path/to/file",
                details={"setting": name},
            )
    if not has_executors(master):
        return
    for name, required in REQUIRED_ON_A_CLUSTER.items():
        if given.get(name, required).strip().lower() != required:
            raise SparkUnprotectedError(
                f"{name} must be {required} for {master}, because rows and credentials are sent to its executors",
                hint=f"remove {name.removeprefix('spark.')} from [spark] in fleet.toml;"
                " the cluster needs the same settings: docs/spark.md",
                details={"setting": name},
            )
    if not _needs_shared_secret(master) or given.get(SECRET):
        return
    if not given.get(SECRET_FILE):
        raise SparkUnprotectedError(
            f"{SECRET} is not set for {master}, although rows and credentials are sent to its executors",
            hint='set authenticate.secret = "${VARIABLE}" or authenticate.secret.file in [spark] of fleet.toml to the'
            " cluster's secret: docs/spark.md",
            details={"setting": SECRET},
        )
    _read_secret(Path(given[SECRET_FILE]))


def protection_settings(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return settings that protect a session at `master`, as defaults for `given`; raise SparkUnprotectedError."""
    check_protection(master, given)
    settings = PROTECTION | REQUIRED_ON_A_CLUSTER if has_executors(master) else PROTECTION
    if master.startswith(MAKE_SECRETS):
        return dict(settings)
    if _needs_shared_secret(master) and not given.get(SECRET):
        return settings | {SECRET: _read_secret(Path(given[SECRET_FILE]))}
    return settings | {SECRET: secrets.token_hex(32)}


def _needs_shared_secret(master: str) -> bool:
    """Whether all sessions share one secret with the cluster's masters and workers."""
    return master.startswith("spark://")


def _read_secret(path: Path) -> str:
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SparkUnprotectedError(
            f"{SECRET_FILE}: {path} can't be read: {reason}", hint="name a file that contains the cluster's secret"
        ) from error
    if not secret:
        raise SparkUnprotectedError(
            f"{SECRET_FILE}: {path} is empty", hint="name a file that contains the cluster's secret"
        )
    remember_secret(secret)
    return secret


DAEMON_MODULE = "cutline.spark.python_daemon"
LOOPBACK = "127.0.0.1"
ROWS_PER_ARROW_BATCH_MAX = 100_000
BYTES_PER_ARROW_BATCH_MAX = 64 * 1024**2
SHUFFLE_PARTITIONS_MIN = 8
TASK_ATTEMPTS_MAX = 4
DRIVER_MEMORY_BYTES_MIN = 1024**3
DRIVER_MEMORY_BYTES_MAX = 8 * 1024**3
# The path of a socket is at most 104 bytes long on macOS (108 on Linux), including 43 bytes for Spark's name.
SOCKET_FOLDER_BYTES_MAX = 60
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
# The names of the C locale's encoding on Linux and macOS, and the locale that differs from C only in its encoding.
ASCII, UTF8_LOCALE = ("ANSI_X3.4-1968", "US-ASCII"), "C.UTF-8"
WORKER_PYTHON = "spark.pyspark.python"
DRIVER_OPTIONS = "spark.driver.extraJavaOptions"
# With the optimising compiler, a session with a few plain jobs takes twice the processor time, but a shuffle of
# millions of rows takes half of it (measured).
BRIEF = "-XX:TieredStopAtLevel=1"
EXECUTOR_OPTIONS = "spark.executor.extraJavaOptions"

# Notebooks and clusters leave these variables in the environment. They lead to a Spark Connect server or to another
# program's JVM, so a session with its own JVM must not use them on any master.
FOREIGN_VARIABLES = (
    "SPARK_REMOTE",
    "SPARK_LOCAL_REMOTE",
    "SPARK_API_MODE",
    "SPARK_CONNECT_MODE",
    "SPARK_CONNECT_MODE_ENABLED",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "PYSPARK_PIN_THREAD",
)
# If everything runs on this machine, these variables are dropped, too: they would add foreign packages, agents, classes
# and settings to the JVM that has the credentials, or move its files elsewhere. On a cluster they are kept, because the
# platform describes itself through them.
FOREIGN_VARIABLES_HERE = (
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_CONF_DIR",
    "SPARK_ENV_LOADED",
    "SPARK_SUBMIT_OPTS",
    "SPARK_JAVA_OPTS",
    "SPARK_DIST_CLASSPATH",
    "SPARK_CLASSPATH",
    "SPARK_PREPEND_CLASSES",
    "SPARK_TESTING",
    "SPARK_SQL_TESTING",
    "SPARK_LOCAL_DIRS",
    "SPARK_EXECUTOR_DIRS",
    "SPARK_LOCAL_HOSTNAME",
    "SPARK_PUBLIC_DNS",
    "SPARK_USER",
    "SPARK_MASTER",
    "MASTER",
    "SPARK_DRIVER_MEMORY",
    "SPARK_EXECUTOR_MEMORY",
    "SPARK_EXECUTOR_CORES",
    "SPARK_MEM",
    "SPARK_BUFFER_SIZE",
    "SPARK_ANSI_SQL_MODE",
    "SPARK_REUSE_WORKER",
    "HADOOP_CONF_DIR",
    "YARN_CONF_DIR",
    "HADOOP_CLASSPATH",
    "HADOOP_PROXY_USER",
    "HADOOP_USER_NAME",
    "CLASSPATH",
    "JDK_JAVA_OPTIONS",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
)

DRIVER_CLASS_PATH = "spark.driver.extraClassPath"
# The variables from which Spark's launcher builds the class path.
CLASS_PATH_VARIABLES = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "HADOOP_CONF_DIR", "YARN_CONF_DIR")

# The configuration of Spark's log, which goes to a file: users could not act on it, and errors reach the command as
# exceptions.
LOG4J = """rootLogger.level = error
rootLogger.appenderRef.file.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c: %m%n%ex
"""


def with_retries(master: str) -> str:
    """Return `master` with task retries as on a cluster; plain `local[4]` fails when a task's process dies."""
    if threads := re.fullmatch(r"local(?:\[\s*(\d+|\*)\s*\])?", master):
        return f"local[{threads.group(1) or 1},{TASK_ATTEMPTS_MAX}]"
    return master


def session_settings(
    master: str, given: Mapping[str, str], name: str, temporary: Path, jvm_options: list[str]
) -> dict[str, str]:
    """Return all settings for the session; raise SparkUnprotectedError.

    The settings in `given` override all others, except that JVM options are appended.
    """
    settings = {
        "spark.master": with_retries(master),
        "spark.app.name": f"snapshot {name}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(temporary / "warehouse"),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_PER_ARROW_BATCH_MAX),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(BYTES_PER_ARROW_BATCH_MAX),
        "spark.python.worker.reuse": "true",
        f"spark.executorEnv.{allocator.VARIABLE}": allocator.SYSTEM,
        "spark.driver.memory": f"{driver_memory_bytes() // 1024**2}m",
        "spark.pyspark.driver.python": sys.executable,
    }
    if runs_on_this_machine(master):
        settings |= _places_on_this_machine(temporary)
    if not has_executors(master):
        settings |= _settings_without_executors(master, temporary)
    settings |= protection_settings(master, given)
    # A folder's name may contain spaces and quotes.
    chosen = {DRIVER_OPTIONS: shlex.join(jvm_options), EXECUTOR_OPTIONS: settings.get(EXECUTOR_OPTIONS, "")}
    settings |= given
    for options, ours in chosen.items():
        if ours or options in given:
            settings[options] = f"{ours} {given.get(options, '')}".strip()
    return settings


def jvm_options(temporary: Path, *, runs_tasks: bool, is_brief: bool) -> list[str]:
    """Return the driver's JVM options, except the class archive's, and write the log configuration.

    `runs_tasks`: the driver runs all tasks, because there are no executors. `is_brief`: no job of the session is worth
    the time of the JVM's optimising compiler.
    """
    log4j = temporary / "log4j2.properties"
    log4j.write_text(LOG4J, encoding="utf-8")
    options = [f"-Dlog4j2.configurationFile={log4j.as_uri()}", "-Xlog:disable", "-Xlog:all=error:stderr"]
    options += files_options(temporary)
    if runs_tasks:
        # Measured on 8 million rows, hashing and Arrow transfer take half as long as with G1. A cluster chooses its own
        # collector.
        options.append("-XX:+UseParallelGC")
    if is_brief:
        options.append(BRIEF)
    return options


def files_options(temporary: Path) -> list[str]:
    """Return options that make a JVM keep native libraries in `temporary`, and write no performance data to /tmp."""
    options = [f"-Djava.io.tmpdir={temporary}", "-XX:-UsePerfData"]
    # For a user without a home, Java's user.home is "?", and Spark would create a folder with that name.
    return [*options, f"-Duser.home={temporary}"] if is_unnamed_user() else options


def added_to_class_path(master: str, given: Mapping[str, str]) -> str:
    """Return what the settings in fleet.toml and, on a cluster, the environment add to Spark's class path."""
    variables = () if runs_on_this_machine(master) else CLASS_PATH_VARIABLES
    found = [given.get(DRIVER_CLASS_PATH, ""), *(os.environ.get(name, "") for name in variables)]
    return "\n".join(found).strip()


def set_encoding_of_paths() -> None:
    """Make the JVM name files in UTF-8, as Python does, in a locale that has only ASCII, such as LC_ALL=C."""
    if locale.nl_langinfo(locale.CODESET) in ASCII:
        os.environ["LC_ALL"] = UTF8_LOCALE


def drop_foreign_variables(master: str) -> None:
    """Remove environment variables that other programs have set for their own sessions.

    Must be called before pyspark is imported, which reads some of the variables.
    """
    for name in (*FOREIGN_VARIABLES, *(FOREIGN_VARIABLES_HERE if runs_on_this_machine(master) else ())):
        os.environ.pop(name, None)


def set_environment(master: str, given: Mapping[str, str], java: Java, spark_home: Path) -> None:
    """Set the environment variables that Spark's launcher reads, for the life of this process.

    `given` or the user's environment may choose a different Python for the executors' workers than for the driver.
    """
    set_encoding_of_paths()
    # The launcher is a JVM as well, which would otherwise write a file in /tmp.
    os.environ["SPARK_LAUNCHER_OPTS"] = "-XX:-UsePerfData"
    os.environ["JAVA_HOME"] = str(java.launch_home)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    chosen = (given.get(WORKER_PYTHON) or os.environ.get("PYSPARK_PYTHON")) if has_executors(master) else ""
    os.environ["PYSPARK_PYTHON"] = chosen or sys.executable
    if runs_on_this_machine(master):
        os.environ["SPARK_HOME"] = str(spark_home)
        os.environ["SPARK_LOCAL_IP"] = LOOPBACK
    else:
        os.environ.setdefault("SPARK_HOME", str(spark_home))


def driver_memory_bytes() -> int:
    """Return a quarter of the machine's or container's memory, within the bounds that Spark needs."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or its content is "max"
        available = min(available, int(CGROUP_MEMORY_LIMIT.read_text()))
    return max(DRIVER_MEMORY_BYTES_MIN, min(available // 4, DRIVER_MEMORY_BYTES_MAX))


def _places_on_this_machine(temporary: Path) -> dict[str, str]:
    return {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.local.dir": str(temporary / "local"),
        EXECUTOR_OPTIONS: shlex.join(files_options(temporary)),
        # Executors import the same packages as this process, even if they are not installed.
        "spark.executorEnv.PYTHONPATH": str(Path(cutline.__file__).resolve().parents[1]),
        # Otherwise a `cutline` folder in the working directory would come first.
        "spark.executorEnv.PYTHONSAFEPATH": "1",
    }


def _settings_without_executors(master: str, temporary: Path) -> dict[str, str]:
    settings = {"spark.python.daemon.module": DAEMON_MODULE}
    if len(os.fsencode(temporary)) <= SOCKET_FOLDER_BYTES_MAX:
        # Over TCP, a task waits 40 ms for a delayed acknowledgement, which is longer than a small task takes.
        settings["spark.python.unix.domain.socket.enabled"] = "true"
        settings["spark.python.unix.domain.socket.dir"] = str(temporary)
    if cores := cores_of(master):
        settings["spark.sql.shuffle.partitions"] = str(max(SHUFFLE_PARTITIONS_MIN, 2 * cores))
    return settings
