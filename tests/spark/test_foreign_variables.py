"""Sessions in the environment of notebooks, clusters and cron: what is there for other programs reaches none of ours.

Each variable would end the session, or leave a trace in what the job returns. The short form sets all at once, the long
form each alone.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from cutline.spark.settings import FOREIGN_VARIABLES, FOREIGN_VARIABLES_HERE, drop_foreign_variables
from tests.run.quick_spark import SETTINGS
from tests.run.soak import SOAK_SECONDS

SECONDS_MAX = 240
# In its folder `conf` are settings, a script and a Hadoop file of others.
HOSTILE = {
    "SPARK_REMOTE": "sc://127.0.0.1:1",
    "SPARK_LOCAL_REMOTE": "1",
    "SPARK_API_MODE": "connect",
    "SPARK_CONNECT_MODE": "1",
    "SPARK_CONNECT_MODE_ENABLED": "1",
    "PYSPARK_GATEWAY_PORT": "1",
    "PYSPARK_GATEWAY_SECRET": "other",
    "PYSPARK_PIN_THREAD": "false",
    "PYSPARK_SUBMIT_ARGS": "--packages none.such:package:1 --conf spark.hostile=1 pyspark-shell",
    "SPARK_CONF_DIR": "{conf}",
    "SPARK_ENV_LOADED": "1",
    "SPARK_SUBMIT_OPTS": "-Dhostile=1",
    "SPARK_JAVA_OPTS": "-Dhostile=1",
    "SPARK_DIST_CLASSPATH": "{conf}",
    "SPARK_CLASSPATH": "{conf}",
    "SPARK_PREPEND_CLASSES": "1",
    "SPARK_LOCAL_DIRS": "{dirs}",
    "SPARK_EXECUTOR_DIRS": "{dirs}",
    "SPARK_LOCAL_HOSTNAME": "no.such.host",
    "SPARK_PUBLIC_DNS": "no.such.host",
    "SPARK_USER": "other",
    "SPARK_MASTER": "spark://127.0.0.1:1",
    "MASTER": "spark://127.0.0.1:1",
    "SPARK_DRIVER_MEMORY": "1m",
    "SPARK_EXECUTOR_MEMORY": "1m",
    "SPARK_MEM": "1m",
    "SPARK_ANSI_SQL_MODE": "false",
    "HADOOP_CONF_DIR": "{conf}",
    "YARN_CONF_DIR": "{conf}",
    "HADOOP_CLASSPATH": "{conf}",
    "HADOOP_PROXY_USER": "other",
    "HADOOP_USER_NAME": "other",
    "CLASSPATH": "{conf}",
    "JDK_JAVA_OPTIONS": "-Dhostile=1",
    "JAVA_TOOL_OPTIONS": "-Dhostile=1",
    "_JAVA_OPTIONS": "-Dhostile=1",
}
JOB = """
import json, sys
from cutline.spark.start import start_spark_at

with start_spark_at("local[1]", json.loads(sys.stdin.read()), "test") as start:
    session = start.session()
    jvm, conf = session._jvm, session.sparkContext.getConf()
    rows = session.range(3).mapInArrow(lambda batches: batches, "id bigint").collect()
    print(json.dumps({
        "rows": [row["id"] for row in rows],
        "kind": type(session.range(1).sparkSession).__module__,
        "master": session.sparkContext.master,
        "property": jvm.System.getProperty("hostile"),
        "setting": conf.get("spark.hostile"),
        "packages": conf.get("spark.jars.packages"),
        "hadoop": session._jsc.hadoopConfiguration().get("hostile"),
        "home": jvm.System.getenv("SPARK_HOME"),
        "user": session.sparkContext.sparkUser(),
        "ansi": session.conf.get("spark.sql.ansi.enabled"),
    }))
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "spark-defaults.conf").write_text("spark.hostile 1\nspark.jars.packages none.such:package:1\n")
    (folder / "spark-env.sh").write_text(f"touch {tmp_path}/script-ran\nexport JDK_JAVA_OPTIONS=-Dhostile=1\n")
    (folder / "core-site.xml").write_text(
        "<configuration><property><name>hostile</name><value>1</value></property></configuration>"
    )
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("names", [[name] for name in HOSTILE] if SOAK_SECONDS else [[*HOSTILE]], ids=" ".join)
def test_what_is_set_for_other_programs_reaches_no_session(names: list[str], conf: Path) -> None:
    dirs = conf.parent / "dirs"
    dirs.mkdir()
    set_there = {name: HOSTILE[name].format(conf=conf, dirs=dirs) for name in names}
    # The environment and the folder of temporary files have names that the C locale can't write.
    folder = conf.parent / "ü"
    folder.mkdir()
    (folder / "environment").symlink_to(sys.prefix)
    set_there |= {"LC_ALL": "C", "TMPDIR": str(folder)}
    python = folder / "environment" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", JOB], input=json.dumps(SETTINGS), capture_output=True, text=True, check=False,
        timeout=SECONDS_MAX, env=os.environ | set_there,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "rows": [0, 1, 2], "kind": "pyspark.sql.session", "master": "local[1,4]", "property": None, "setting": None,
        "packages": None, "hadoop": None, "user": getpass.getuser(), "ansi": "true",
        "home": str(folder / "environment" / Path(pyspark.__file__).parent.relative_to(sys.prefix)),
    }  # fmt: skip
    assert not (conf.parent / "script-ran").exists()
    assert list(dirs.iterdir()) == []


def test_on_a_cluster_the_platforms_own_variables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (*FOREIGN_VARIABLES, *FOREIGN_VARIABLES_HERE)
    assert set(HOSTILE) <= set(every)
    for master, kept in (("spark://m:7077", FOREIGN_VARIABLES_HERE), ("local[2]", ()), ("local-cluster[1,1,1024]", ())):
        for name in every:
            monkeypatch.setenv(name, "x")
        drop_foreign_variables(master)
        assert [name for name in every if name in os.environ] == list(kept)
