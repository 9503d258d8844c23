"""The only place that builds a Spark session; everything else receives it.

Spark starts in a thread, so that the command can do other work in the meantime. The JVM runs in a separate process
session: Ctrl-C reaches only this process, which then ends the JVM. If this process dies, the JVM reaches the end of its
input and exits. Importing this module does not import pyspark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from cutline.fleet.config import has_executors, runs_on_this_machine
from cutline.fleet.own_files import cache_folder
from cutline.fleet.own_process import check_working_directory, is_unnamed_user
from cutline.spark.class_archive import archive_options, is_recording
from cutline.spark.deferred_session import DeferredSession
from cutline.spark.java import Java, find_java
from cutline.spark.jvm_command import ENVIRONMENT, is_submitted, jvm_command
from cutline.spark.needs import is_of_connection
from cutline.spark.served_archive import ARCHIVE, HOST, ServedArchive
from cutline.spark.session_folder import lasting_folder
from cutline.spark.settings import (
    BRIEF,
    EXECUTOR_OPTIONS,
    LOOPBACK,
    added_to_class_path,
    check_protection,
    drop_foreign_variables,
    in_private_file,
    jvm_options,
    session_settings,
    set_environment,
    with_private_options,
)
from cutline.storage import waits
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError, redact
from cutline.storage.process_limits import (
    MEMORY_HINT,
    NoSpaceError,
    TooLittleMemoryError,
    says_full_disk,
    says_no_memory,
    says_used_up,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.fleet.config import Fleet

LAUNCH_SECONDS_MAX = 10
END_SECONDS_MAX = 10
LOOK_SECONDS = 1.0
# How long a JVM may take to end after its connections.
LOST_SECONDS_MAX = 2.0
UNNAMED_USER = "cutline"
# Spark logs this if its peer has a different secret or none, or uses a different version or cipher.
UNTRUSTED = "Exception while bootstrapping client"
# Spark logs this before it ends because executors on Kubernetes ended one after the other.
EXECUTORS_FAILED = "Max number of executor failures"
# Spark logs this in the same case, but on a standalone cluster.
APPLICATION_REMOVED = "Master removed our application: FAILED"
CAUSED_BY = "Caused by: "
IN_MAIN, INITIALIZER = 'Exception in thread "main" ', "java.lang.ExceptionInInitializerError"


class SparkStartError(RefusedError):
    """Spark did not start; its log is kept, unless there is no space for it."""

    def __init__(self, reason: str, log: Path | None) -> None:
        where = f"check its log, {log}, and" if log else "its log could not be kept; check"
        super().__init__(
            f"spark did not start: {reason}",
            hint=f"{where} the master and settings in [spark] of fleet.toml",
            details={"log": str(log) if log else None},
        )


class SparkEndedError(UnreachableError):
    """Spark's JVM ended while a command needed it."""

    def __init__(self, code: int) -> None:
        # Popen gives the number of a signal as a negative code.
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        super().__init__(
            f"spark's process ended before the command: it {how}",
            hint="if the system was short of memory (journalctl -k, dmesg), allow the machine or container more of it,"
            " or set driver.memory in [spark] of fleet.toml; then repeat the command",
            details={"code": code},
        )


class NoLoopbackError(RefusedError):
    """The machine has no IPv4 loopback address, which Spark's processes use to communicate."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"spark did not start: its processes communicate over {LOOPBACK}, which this machine doesn't have:"
            f" {reason}",
            hint=f"add the address to the loopback interface: ip address add {LOOPBACK}/8 dev lo",
        )


def check_loopback() -> None:
    """Raise NoLoopbackError unless this process can listen at LOOPBACK, the only address that py4j supports."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, 0))
        except OSError as error:
            raise NoLoopbackError(error.strerror or str(error)) from error


def start_spark(fleet: Fleet, name: str, *, is_brief: bool = False) -> SparkStart:
    """Start Spark in the background as fleet.toml configures it, for the command `name`; return at once."""
    return start_spark_at(fleet.spark_master, fleet.spark_settings, name, is_brief=is_brief)


def start_spark_at(master: str, settings: Mapping[str, str], name: str, *, is_brief: bool = False) -> SparkStart:
    """Start Spark at `master` in the background and return at once; `settings` override Cutline's own.

    `is_brief`: no job is worth the time of the JVM's optimising compiler.

    Raises SparkUnprotectedError if `settings` leave the session unprotected, and FolderGoneError, because no JVM starts
    in a deleted folder.
    """
    check_protection(master, settings)
    check_working_directory()
    return SparkStart(master, settings, name, is_brief=is_brief)


class SparkStart:
    """A Spark session that is starting, running or stopped. A process can have only one at a time."""

    def __init__(self, master: str, settings: Mapping[str, str], name: str, *, is_brief: bool = False) -> None:
        self._master = master
        self._settings = settings
        self._name = name
        self.is_brief = is_brief
        self.temporary = Path(tempfile.mkdtemp(prefix="spark-"))
        self.is_recording = False
        self._log = self.temporary / "spark.log"
        self._gateway: Any = None
        self._jvm: subprocess.Popen[bytes] | None = None
        self._session: SparkSession | None = None
        self._error: BaseException | None = None
        self._work: Path | None = None
        self._archive: ServedArchive | None = None
        self._is_unwanted = threading.Event()
        # Wait for this event instead of the thread: up to Python 3.12 an interrupted join marks the thread as ended.
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._start, name="start spark", daemon=True)
        self._thread.start()

    def session(self) -> SparkSession:
        """Wait for the session and return it; raise NoJavaError, SparkStartError or TooLittleMemoryError."""
        # If memory is short, the thread may end before it can set the event.
        while not self._is_over.wait(LOOK_SECONDS) and self._thread.is_alive():
            pass
        if self._error is not None:
            raise self._error
        if self._session is None:
            if self._is_unwanted.is_set():
                raise RuntimeError("the session was stopped")
            raise TooLittleMemoryError("the thread that starts Spark has ended")
        return self._session

    def stop(self, *, graceful: bool = True, archive_seconds_max: float = 0) -> None:
        """End the session and its JVM, and delete its files. Safe to repeat, even while the session is starting.

        If not `graceful`, kill the JVM without asking Spark, because after an error nothing in it is needed any more.
        Nor is it after success, unless there are executors, settings (a log of events, a listener) or a class archive
        that the JVM still has to write, once per machine: Spark and the JVM take a second to end by themselves. The JVM
        gets `archive_seconds_max` for its archive, then finishes unattended.
        """
        self._is_unwanted.set()
        if not graceful:
            _keep_text(sys.exc_info()[1])
        self._await_jvm(and_session=graceful)
        graceful = graceful and (has_executors(self._master) or bool(self._settings) or self.is_recording)
        session, self._session = self._session, None
        if session is not None and graceful:
            session.stop()
        if self._jvm is not None:
            self._end_jvm(self._jvm, graceful=graceful, archive_seconds_max=archive_seconds_max)
            _forget_session()
            self._jvm = self._gateway = None
        if self._archive is not None:
            self._archive.close()
            self._archive = None
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._work.parent.rmdir()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        ended = self.ended(value)
        self.stop(graceful=error is None)
        if ended is not None:
            raise ended from value

    def ended(self, error: BaseException | None) -> SparkEndedError | None:
        """Return why `error` occurred, if it is the loss of the connection to a JVM that has ended; otherwise None."""
        # An interrupt is not an Exception.
        if self._jvm is None or not isinstance(error, Exception) or isinstance(error, SnapshotError):
            return None
        if not is_of_connection(error):
            return None
        try:
            # The connection ends slightly before the process.
            return SparkEndedError(self._jvm.wait(LOST_SECONDS_MAX))
        except subprocess.TimeoutExpired:
            return None

    def _start(self) -> None:
        try:
            self._build()
        except SnapshotError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  # session() raises it
            # An exception that occurs because stop() ended the JVM while it was starting is not an error.
            if not self._is_unwanted.is_set():
                self._error = _start_error(error, self._log)
                self._error.__cause__ = error
        finally:
            self._is_over.set()
        self._start_workers()

    def _start_workers(self) -> None:
        """Run an empty task, so that the first job finds Python's workers ready.

        The process from which they are forked imports modules for a second, in which the command does other work.
        """
        if self._session is None or has_executors(self._master) or self._is_unwanted.is_set():
            return
        from cutline.columns.python_workers import begin_task

        # If it fails, the first job starts the workers, or fails with the reason.
        with contextlib.suppress(Exception):
            self._session.sparkContext.parallelize([None], 1).foreach(begin_task)

    def _build(self) -> None:
        check_loopback()
        drop_foreign_variables(self._master)
        import pyspark

        if pyspark.SparkContext._active_spark_context is not None:
            raise RuntimeError("this process has a Spark session already")
        spark_home = Path(pyspark.__file__).parent
        java, settings = self._configure(spark_home, pyspark.__version__)
        with self._log.open("wb") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            if has_executors(self._master) or is_submitted(self._settings):
                settings = with_private_options(settings, self.temporary)
                with in_private_file(settings, self.temporary):
                    self._launch_gateway(output)
            else:
                self._launch_gateway(output, jvm_command(java, spark_home, settings, self.temporary))
        if self._is_unwanted.is_set():
            return
        if settings.get(ARCHIVE) and has_executors(self._master):
            spark = self._gateway.jvm.org.apache.spark
            host = spark.SparkConf().get(HOST, spark.util.Utils.localCanonicalHostName())
            self._archive = ServedArchive(settings, host)
            settings |= self._archive.settings
        if self.is_brief and has_executors(self._master):
            # The JVM also has the options of the platform's spark-defaults.conf. Of two options, the last one counts.
            known = self._gateway.jvm.org.apache.spark.SparkConf().get(EXECUTOR_OPTIONS, "")
            settings[EXECUTOR_OPTIONS] = f"{BRIEF} {known}".strip()
        if is_unnamed_user():
            # Hadoop looks up the name of the current user in the system unless a name is set.
            users = self._gateway.jvm.org.apache.hadoop.security.UserGroupInformation
            users.setLoginUser(users.createRemoteUser(UNNAMED_USER))
        conf = pyspark.SparkConf(loadDefaults=False).setAll(list(settings.items()))
        context = pyspark.SparkContext(conf=conf, gateway=self._gateway)
        # The workers of a local-cluster keep their executors' files in SPARK_HOME and never delete them.
        self._work = Path(os.environ["SPARK_HOME"]) / "work" / str(context.applicationId)
        # Otherwise socketserver would print an error when a killed JVM's connection ends.
        setattr(context._accumulatorServer, "handle_error", lambda *_: None)  # noqa: B010  # mypy refuses the plain form
        self._session = cast("SparkSession", DeferredSession(context))

    def _launch_gateway(self, output: dict[str, Any], direct: Sequence[str] = ()) -> None:
        """Start the JVM, with the command `direct` or else by Spark's launcher, and connect to it.

        The process is stored in `_jvm` at once, because it may take a long time to connect to the JVM, and stop() must
        be able to end it. A JVM that can't write its connection file would not end: only its first thread would die.
        """
        from pyspark import java_gateway

        def launch(command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
            if self._is_unwanted.is_set():
                raise RuntimeError("the session was stopped")
            if direct:
                settings["env"] |= ENVIRONMENT
            self._jvm = subprocess.Popen(direct or command, **settings)
            return self._jvm

        setattr(java_gateway, "Popen", launch)  # noqa: B010  # mypy refuses the plain form
        self._gateway = java_gateway.launch_gateway(None, output)  # type: ignore[no-untyped-call]  # pyspark's own

    def _configure(self, spark_home: Path, spark_version: str) -> tuple[Java, dict[str, str]]:
        _silence_pyspark()
        java = find_java(*filter(None, [cache_folder()]), self.temporary)
        added = added_to_class_path(self._master, self._settings)
        archive = archive_options(java, spark_home, spark_version, added)
        self.is_recording = is_recording(archive)
        set_environment(self._master, self._settings, java, spark_home)
        if runs_on_this_machine(self._master):
            # Tasks inherit this variable.
            os.environ[waits.VARIABLE] = str(self.temporary / "store-waits")
        runs_tasks = not has_executors(self._master)
        options = [*archive, *jvm_options(self.temporary, runs_tasks=runs_tasks, is_brief=self.is_brief)]
        return java, session_settings(self._master, self._settings, self._name, self.temporary, options)

    def _await_jvm(self, *, and_session: bool) -> None:
        """Wait until there is a JVM to end, or until it is certain that none will be started."""
        deadline = time.monotonic() + LAUNCH_SECONDS_MAX
        while and_session or self._jvm is None:
            if self._is_over.wait(0.05) or time.monotonic() > deadline:
                return

    def _end_jvm(self, jvm: subprocess.Popen[bytes], *, graceful: bool, archive_seconds_max: float) -> None:
        """Ask the JVM to end; kill it and its children if it does not, or if not `graceful`."""
        if graceful and self._gateway is not None:
            # Skip this after an aborted call: shutdown would wait for the call's answer.
            self._gateway.shutdown()
        if jvm.stdin is not None:
            jvm.stdin.close()
        if graceful or not runs_on_this_machine(self._master):
            # On SIGTERM the JVM's shutdown hooks release our resources on a cluster.
            jvm.terminate()
            if self.is_recording and archive_seconds_max == 0:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                jvm.wait(max(END_SECONDS_MAX, archive_seconds_max))
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(jvm.pid, signal.SIGKILL)
        jvm.wait()


def _start_error(error: Exception, log: Path) -> SnapshotError:
    reason, kept = _reason(error, log), None
    with contextlib.suppress(OSError):
        kept = _keep(log)
    if says_no_memory(reason):
        where = f"; Spark's log: {kept}" if kept else ""
        return TooLittleMemoryError(
            f"spark did not start: {reason}",
            hint=f"{MEMORY_HINT}; driver.memory in [spark] of fleet.toml sets Spark's own heap size{where}",
        )
    return NoSpaceError(reason) if says_full_disk(reason) else SparkStartError(reason, kept)


def _keep(log: Path) -> Path:
    """Copy the log to a file that outlives the command and that only its owner can read."""
    handle, kept = tempfile.mkstemp(prefix="snapshot-spark-", suffix=".log", dir=lasting_folder())
    with os.fdopen(handle, "w", errors="backslashreplace") as copy, contextlib.suppress(FileNotFoundError):
        copy.write(redact(log.read_text(errors="replace")))
    return Path(kept)


def _silence_pyspark() -> None:
    """Keep Spark's logging off stderr, because the logged exceptions are raised as well."""
    from pyspark.logger import PySparkLogger

    # The warning concerns pandas objects, which Cutline does not use: rows travel as Arrow batches.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "while sending command" not in str(record.msg))


def _forget_session() -> None:
    """Make pyspark forget its JVM, so that this process can start another."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def _keep_text(error: BaseException | None) -> None:
    """Add the text of Spark's exceptions as notes: they would ask the JVM for it later, but the JVM is about to end."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__module__.startswith(("pyspark.", "py4j.")):
            with contextlib.suppress(Exception):
                error.add_note(str(error))
        error = error.__cause__ or error.__context__


def _reason(error: Exception, log: Path) -> str:
    """Return the line that explains the error: a Java exception with its first cause, or a line of a dead JVM's log."""
    # Spark's exceptions ask the JVM for their text, but the JVM may have ended.
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)
    lines = text.splitlines() or [type(error).__name__]
    reason = next((line[2:] for line in lines if line.startswith(": ")), lines[0])
    causes = [line.removeprefix(CAUSED_BY) for line in lines if line.startswith(CAUSED_BY)]
    logged = log.read_text(errors="replace").splitlines() if log.exists() else []
    if any(EXECUTORS_FAILED in line for line in logged):
        return (
            "its executors exit as soon as they start; see their pods' logs, which are kept if"
            ' "kubernetes.executor.deleteOnTermination" = "false" in [spark]'
        )
    if any(APPLICATION_REMOVED in line for line in logged):
        return "its executors exit as soon as they start; see the logs of the cluster's workers"
    if any(map(says_used_up, logged)):
        return "too many open files"
    if lacking := next(filter(says_no_memory, [*logged, *lines]), ""):
        return lacking
    if text and "JAVA_GATEWAY_EXITED" not in reason and "stopped SparkContext" not in reason:
        return f"{reason}: {causes[-1]}" if causes else reason
    if any(UNTRUSTED in line for line in logged):
        return "it and the cluster have different secrets (spark.authenticate.secret) or different encryption settings"
    reasons = [line for line in logged if "Exception" in line or "Reason: " in line]
    first = next(iter([*reasons, *logged[-1:], reason])).rpartition("Reason: ")[2]
    # If a JVM dies while it loads a class, the first line says only that, so add the last cause.
    causes = [line.removeprefix(CAUSED_BY) for line in logged if line.startswith(CAUSED_BY)]
    return f"{first}: {causes[-1]}" if causes and first == IN_MAIN + INITIALIZER else first
