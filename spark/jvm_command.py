"""The command that starts a JVM in which everything runs on this machine.

Spark's own launcher is a shell that starts a JVM that prints the command of another JVM. That JVM first runs
SparkSubmit, which prepares for any cluster, and then the gateway for Python. Here the JVM starts the gateway at once,
in half the time; its settings follow through the gateway. Sources: SparkSubmitCommandBuilder and JavaModuleOptions in
Spark's launcher, and bin/spark-submit.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from cutline.spark.java import Java
from cutline.spark.settings import DRIVER_CLASS_PATH, DRIVER_JAVA_OPTIONS, write_arguments

GATEWAY = "org.apache.spark.api.python.PythonGatewayServer"
# Settings that only SparkSubmit follows: it downloads packages and adds to the class path.
SUBMITTED = (
    "spark.jars",
    "spark.files",
    "spark.archives",
    "spark.submit.",
    "spark.kerberos.",
    DRIVER_CLASS_PATH,
    "spark.driver.extraLibraryPath",
)
# Packages of Java that Spark accesses by reflection. A test compares them with those that Spark's launcher opens.
OPENED = {
    "java.base": (
        "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util",
        "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref", "sun.nio.ch", "sun.nio.cs",
        "sun.security.action", "sun.util.calendar",
    ),
    "java.security.jgss": ("sun.security.krb5",),
}  # fmt: skip
# Other options of Spark's launcher. Older versions of Java don't know all of them.
OTHERS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)
# bin/spark-submit sets it, so that hashes of strings are the same in all workers.
ENVIRONMENT = {"PYTHONHASHSEED": "0"}


def is_submitted(given: Mapping[str, str]) -> bool:
    """Whether SparkSubmit must start the JVM, because `given`, the settings in fleet.toml, need it."""
    return any(name.startswith(SUBMITTED) for name in given)


def jvm_command(java: Java, spark_home: Path, settings: Mapping[str, str], folder: Path) -> list[str]:
    """Return the command of a JVM with the gateway for Python; its options are in a private file in `folder`."""
    jars = spark_home / "jars"
    # The order of the launcher's class path, so that JVMs that it starts can use the same class archive.
    class_path = ":".join(map(str, (spark_home / "conf", *sorted(jars.glob("slf4j-api-*.jar")), jars / "*")))
    words = ["-cp", class_path, f"-Xmx{settings['spark.driver.memory']}", *OTHERS]
    words += [f"--add-opens={module}/{package}=ALL-UNNAMED" for module in OPENED for package in OPENED[module]]
    for name in reversed(DRIVER_JAVA_OPTIONS):
        words += shlex.split(settings.get(name, ""))
    file = folder / "jvm-options.txt"
    write_arguments(file, words)
    return [str(java.home / "bin" / "java"), f"@{file}", GATEWAY]
