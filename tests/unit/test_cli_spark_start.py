"""What is said of a Spark that did not start: the cause, not what wraps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.spark.start import _reason

# As Spark, py4j and its log have worded them.
WRAPPED = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: External scheduler cannot be instantiated
\tat org.apache.spark.SparkContext$.createTaskScheduler(SparkContext.scala:3260)
Caused by: java.lang.reflect.InvocationTargetException
\t... 15 more
Caused by: java.net.UnknownHostException: kubernetes.default.svc
\t... 28 more"""
PLAIN = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: Could not parse Master URL: 'x'
\tat org.apache.spark.SparkContext$.createTaskScheduler(SparkContext.scala:3260)"""
STOPPED = "Cannot call methods on a stopped SparkContext."
FAILED = """2026-11-23T17:01:30,399 ERROR org.apache.spark.util.Utils: Uncaught exception in thread Thread-3
io.fabric8.kubernetes.client.KubernetesClientTimeoutException: Timed out waiting for [1000] milliseconds
2026-11-23T17:02:04,594 ERROR ExecutorPodsLifecycleManager: Max number of executor failures (4) reached
"""


REMOVED = """2026-11-26T12:17:46 ERROR Application has been killed. Reason: Master removed our application: FAILED
"""
DIED = "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
NO_HOST = """Exception in thread "main" java.lang.ExceptionInInitializerError
\tat org.apache.spark.deploy.SparkSubmit.main(SparkSubmit.scala)
Caused by: java.net.UnknownHostException: driver: driver: Name or service not known
\t... 20 more
"""


@pytest.mark.parametrize(
    ("text", "logged", "reason"),
    [
        (
            WRAPPED,
            "",
            "org.apache.spark.SparkException: External scheduler cannot be instantiated: "
            "java.net.UnknownHostException: kubernetes.default.svc",
        ),
        (PLAIN, "", "org.apache.spark.SparkException: Could not parse Master URL: 'x'"),
        (
            STOPPED,
            FAILED,
            "its executors exit as soon as they start; see their pods' logs, which are kept if"
            ' "kubernetes.executor.deleteOnTermination" = "false" in [spark]',
        ),
        (STOPPED, REMOVED, "its executors exit as soon as they start; see the logs of the cluster's workers"),
        (
            DIED,
            NO_HOST,
            'Exception in thread "main" java.lang.ExceptionInInitializerError: java.net.UnknownHostException: driver:'
            " driver: Name or service not known",
        ),
        (
            DIED,
            "Error: Could not create the Java Virtual Machine.\n",
            "Error: Could not create the Java Virtual Machine.",
        ),
    ],
    ids=["wrapped", "plain", "executors", "application", "initializer", "no exception"],
)
def test_the_reason_is_the_first_cause(text: str, logged: str, reason: str, tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text(logged)
    assert _reason(RuntimeError(text), log) == reason


def test_an_exception_whose_jvm_has_ended_has_no_text_and_is_told_by_the_log(tmp_path: Path) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError("the JVM has ended")

    log = tmp_path / "spark.log"
    log.write_text("java.lang.OutOfMemoryError: Java heap space, in an Exception\n")
    assert _reason(SilentError(), log) == "java.lang.OutOfMemoryError: Java heap space, in an Exception"
    log.write_text("")
    assert _reason(SilentError(), log) == "SilentError"
