"""`python -m cutline.spark.executor`: run Spark's executor in a Kubernetes pod with the same image as the command.

Spark puts an executor's settings into the pod's environment, and the image must start the JVM. Spark's own images do
that with a shell script, but they have no Python that can run Cutline. This process becomes the JVM, so that signals
reach the JVM, and its exit code is the pod's.

Source: Spark's `BasicExecutorFeatureStep` and `KubernetesExecutorBackend` classes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cutline.fleet.own_process import is_unnamed_user
from cutline.spark.java import find_java
from cutline.spark.settings import files_options
from cutline.storage.errors import SnapshotError, UsageError

BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
# The options of BACKEND, and the variables that contain their values.
ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
MEMORY = "SPARK_EXECUTOR_MEMORY"
# An executor reads the file named by spark.authenticate.secret.file only if the master is of this kind. Spark sends it
# the real master later, over a connection that needs the secret.
MASTER = "-Dspark.master=k8s://executor"
JAVA_OPTION = "SPARK_JAVA_OPT_"
# Hadoop looks up the name of the current user in the system unless a name is set first. Spark's class does not set one,
# and offers no setting for it. Spark ships a Java compiler, which compiles and runs this class.
NAMING_CLASS = "NamedExecutor"
NAMING = f"""import org.apache.hadoop.security.UserGroupInformation;

public class {NAMING_CLASS} {{
    public static void main(String[] arguments) throws Exception {{
        UserGroupInformation.setLoginUser(UserGroupInformation.createRemoteUser(System.getenv("SPARK_USER")));
        {BACKEND}.main(arguments);
    }}
}}
"""
RUN_SOURCE = "org.codehaus.janino.SimpleCompiler"


class NotInPodError(UsageError):
    """The environment lacks variables that Spark sets in an executor's pod."""

    def __init__(self, lacking: list[str]) -> None:
        super().__init__(
            f"this is not an executor's pod: {', '.join(lacking)} is not set",
            hint="let Spark start the executors; their pod template must run this program: docs/kubernetes.md",
        )


def executor_command(java: Path, spark_home: Path, environment: Mapping[str, str], temporary: Path) -> list[str]:
    """Return the command line of the JVM; raise NotInPodError.

    If the user has no name, also write the source of NAMING_CLASS to `temporary`.
    """
    lacking = [name for name in (*ARGUMENTS.values(), MEMORY) if not environment.get(name)]
    if lacking:
        raise NotInPodError(lacking)
    numbers = sorted(int(name.removeprefix(JAVA_OPTION)) for name in environment if name.startswith(JAVA_OPTION))
    places = [environment.get("SPARK_CLASSPATH"), environment.get("SPARK_CONF_DIR"), f"{spark_home / 'jars'}/*"]
    memory = environment[MEMORY]
    return [
        str(java),
        *files_options(temporary),
        *(environment[f"{JAVA_OPTION}{number}"] for number in numbers),
        *(MASTER, f"-Xms{memory}", f"-Xmx{memory}"),
        *("-cp", ":".join(filter(None, places))),
        *_main(temporary),
        *(word for option, name in ARGUMENTS.items() for word in (option, environment[name])),
    ]


def _main(temporary: Path) -> list[str]:
    if not is_unnamed_user():
        return [BACKEND]
    source = temporary / f"{NAMING_CLASS}.java"
    source.write_text(NAMING, encoding="utf-8")
    return [RUN_SOURCE, str(source), NAMING_CLASS]


def main() -> None:
    """Become the JVM; if no JVM can be started, exit with the error's code."""
    import pyspark

    spark_home, temporary = Path(pyspark.__file__).parent, Path(tempfile.mkdtemp(prefix="executor-"))
    try:
        java = find_java(temporary)
        command = executor_command(java.launch_home / "bin" / "java", spark_home, os.environ, temporary)
    except SnapshotError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.exit(error.exit_code)
    # Spark looks here for the modules of its Python workers.
    os.environ.setdefault("SPARK_HOME", str(spark_home))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
