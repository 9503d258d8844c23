"""The one place that builds a Spark session. Everything else is given one.

A start runs in a thread of its own, so that the command can do something useful meanwhile. The JVM is in a
session of its own: Ctrl-C reaches this process alone, which then ends the JVM; and a JVM whose parent is gone
reads the end of its input and ends itself. Importing this module does not import pyspark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cli.spark.cache_folder import cache_folder
from cli.spark.class_archive import archive_options, is_recording
from cli.spark.java import find_java
from cli.spark.settings import jvm_options, runs_on_this_machine, session_settings, set_environment
from storage.errors import RefusedError, SnapshotError

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from fleet.config import Fleet

LAUNCH_SECONDS_MAX = 10
END_SECONDS_MAX = 10


class SparkStartError(RefusedError):
    """Spark did not start; its log is kept."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(
            f"spark did not start: {reason}",
            hint=f"its log is in {log}; [spark] in the fleet file has the master and the settings",
            details={"log": str(log)},
        )


def start_spark(fleet: Fleet, name: str) -> SparkStart:
    """Begin to start Spark as fleet.toml says, for the command `name`, and return at once."""
    return start_spark_at(fleet.spark_master, fleet.spark_settings, name)


def start_spark_at(master: str, settings: Mapping[str, str], name: str) -> SparkStart:
    """Begin to start Spark at `master` and return at once; `settings` go over the chosen ones."""
    return SparkStart(master, settings, name)


class SparkStart:
    """A Spark session that is being started, is there, or is stopped. One at a time in a process."""

    def __init__(self, master: str, settings: Mapping[str, str], name: str) -> None:
        self._master = master
        self._settings = settings
        self._name = name
        self.temporary = Path(tempfile.mkdtemp(prefix="snapshot-spark-"))
        self.is_recording = False
        self._log = self.temporary / "spark.log"
        self._gateway: Any = None
        self._session: SparkSession | None = None
        self._error: BaseException | None = None
        self._work: Path | None = None
        self._is_unwanted = threading.Event()
        # Not the thread's own end: an interrupted join takes the thread for ended, up to Python 3.12.
        self._is_over = threading.Event()
        threading.Thread(target=self._start, name="start spark", daemon=True).start()

    def session(self) -> SparkSession:
        """The session, waiting until it is there. Raises NoJavaError or SparkStartError."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        if self._session is None:
            raise RuntimeError("the session was stopped")
        return self._session

    def stop(self, *, graceful: bool = True, archive_seconds_max: float = 0) -> None:
        """End the session and its JVM, and delete its files; safe to repeat, and while it is still starting.

        Not `graceful`: without asking Spark, because something went wrong and nothing it holds is wanted. A
        JVM that writes its class archive (once on a machine) is given `archive_seconds_max`, then left alone.
        """
        self._is_unwanted.set()
        if not graceful:
            _keep_text(sys.exc_info()[1])
        self._await_jvm(and_session=graceful)
        session, self._session = self._session, None
        if session is not None and graceful:
            session.stop()
        if self._gateway is not None:
            self._end_jvm(self._gateway.proc, graceful=graceful, archive_seconds_max=archive_seconds_max)
            _forget_session()
            self._gateway = None
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._work.parent.rmdir()
        if not isinstance(self._error, SparkStartError):
            shutil.rmtree(self.temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop(graceful=error is None)

    def _start(self) -> None:
        try:
            self._build()
        except SnapshotError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  # it belongs to whoever waits for the session
            # A JVM that was ended while it started is no failure, and its log is of no use.
            if not self._is_unwanted.is_set():
                self._error = SparkStartError(_reason(error, self._log), self._log)
                self._error.__cause__ = error
        finally:
            self._is_over.set()

    def _build(self) -> None:
        import pyspark
        from pyspark.java_gateway import launch_gateway

        if pyspark.SparkContext._active_spark_context is not None:
            raise RuntimeError("this process has a Spark session already")
        conf = self._configure(Path(pyspark.__file__).parent, pyspark.__version__)
        with self._log.open("wb") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            self._gateway = launch_gateway(conf, output)  # type: ignore[no-untyped-call]  # pyspark's own
        if self._is_unwanted.is_set():
            return
        from pyspark.sql import SparkSession

        context = pyspark.SparkContext(conf=conf, gateway=self._gateway)
        # The workers of a local-cluster keep their executors' files in SPARK_HOME, and leave them there.
        self._work = Path(os.environ["SPARK_HOME"]) / "work" / str(context.applicationId)
        # A JVM that was killed is no news; socketserver would print that its connection ended.
        setattr(context._accumulatorServer, "handle_error", lambda *_: None)  # noqa: B010  # mypy refuses the plain form
        self._session = SparkSession.builder.getOrCreate()

    def _configure(self, spark_home: Path, spark_version: str) -> SparkConf:
        from pyspark import SparkConf

        _silence_pyspark()
        local = runs_on_this_machine(self._master)
        java = find_java(cache_folder() or self.temporary)
        archive = archive_options(java, spark_home, spark_version)
        self.is_recording = is_recording(archive)
        set_environment(self._master, java, spark_home)
        options = [*archive, *jvm_options(self.temporary, local=local)]
        settings = session_settings(self._master, self._settings, self._name, self.temporary, options)
        return SparkConf(loadDefaults=False).setAll(list(settings.items()))

    def _await_jvm(self, *, and_session: bool) -> None:
        """Wait until there is a JVM to end: its process is not known before it has said its port."""
        deadline = time.monotonic() + LAUNCH_SECONDS_MAX
        while and_session or self._gateway is None:
            if self._is_over.wait(0.05) or time.monotonic() > deadline:
                return

    def _end_jvm(self, jvm: subprocess.Popen[bytes], *, graceful: bool, archive_seconds_max: float) -> None:
        """Ask the JVM to end; kill it and all it started if it does not, or has nothing to be asked for."""
        if graceful:
            # Not otherwise: on a thread whose call was cut short it would wait for that call's answer.
            self._gateway.shutdown()
        if jvm.stdin is not None:
            jvm.stdin.close()
        if graceful or not runs_on_this_machine(self._master):
            # Its shutdown hooks release what a cluster holds for us.
            jvm.terminate()
            if self.is_recording and archive_seconds_max == 0:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                jvm.wait(max(END_SECONDS_MAX, archive_seconds_max))
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(jvm.pid, signal.SIGKILL)
        jvm.wait()


def _silence_pyspark() -> None:
    """Keep off stderr what is no news there: the exceptions that are logged are raised as well."""
    from pyspark.logger import PySparkLogger

    # It is about pandas' own objects, which never appear here: rows travel as Arrow batches.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "while sending command" not in str(record.msg))


def _forget_session() -> None:
    """Let pyspark start another JVM in this process: it would keep the one it had, even after its end."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    SparkContext._active_spark_context = SparkContext._gateway = SparkContext._jvm = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def _keep_text(error: BaseException | None) -> None:
    """Note on Spark's exceptions what they say: they ask the JVM for it, which is about to go."""
    while error is not None:
        if type(error).__module__.startswith(("pyspark.", "py4j.")):
            with contextlib.suppress(Exception):
                error.add_note(str(error))
        error = error.__cause__ or error.__context__


def _reason(error: Exception, log: Path) -> str:
    """The line that says what happened: of a Java exception its message, of a JVM that died its last word."""
    lines = str(error).splitlines() or [type(error).__name__]
    reason = next((line[2:] for line in lines if line.startswith(": ")), lines[0])
    if "JAVA_GATEWAY_EXITED" not in reason and "stopped SparkContext" not in reason:
        return reason
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line for line in said if "Exception" in line or "Reason: " in line]
    return next(iter([*telling, *said[-1:], reason])).rpartition("Reason: ")[2]
