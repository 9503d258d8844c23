"""What a standalone master has to offer, for the message that it grants nothing.

Spark asks its master only for executors. What its web page shows, another message of its protocol asks for, which has
no place in PySpark.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as AnswerTimeoutError
from typing import TYPE_CHECKING, Any

from cutline.fleet.some_names import list_some

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWER_SECONDS_MAX = 5.0
NAMED_MAX = 3
DEPLOY = "org.apache.spark.deploy.DeployMessages$"


def read_offer(session: SparkSession) -> str:
    """What the workers of a standalone master have free, as the end of a sentence; "" if that can't be known."""
    master = str(session.sparkContext.master)
    if not master.startswith("spark://"):
        return ""
    # A master that does not answer is asked for two minutes.
    threads = ThreadPoolExecutor(max_workers=1)
    try:
        return threads.submit(_read, session, master).result(ANSWER_SECONDS_MAX)
    except (AnswerTimeoutError, Exception):  # noqa: BLE001  # another version of Spark may not have this message
        return ""
    finally:
        threads.shutdown(wait=False)


def _read(session: SparkSession, master: str) -> str:
    jvm = session.sparkContext._jvm
    if jvm is None:
        return ""
    reflected = jvm.java.lang.Class
    # Its methods can't be listed: one has a type that is not on the class path.
    field = reflected.forName("org.apache.spark.SparkEnv").getDeclaredField("rpcEnv")
    field.setAccessible(True)
    address = jvm.org.apache.spark.rpc.RpcAddress.fromSparkURL(master)
    endpoint = field.get(session._jsc.sc().env()).setupEndpointRef(address, "Master")
    question = reflected.forName(f"{DEPLOY}RequestMasterState$").getField("MODULE$").get(None)
    answer = jvm.scala.reflect.ClassTag.apply(reflected.forName(f"{DEPLOY}MasterStateResponse"))
    workers = [one for one in endpoint.askSync(question, answer).workers() if str(one.state()) == "ALIVE"]
    if not workers:
        return "it has no worker"
    return f"free on its workers: {list_some([_free(one) for one in workers], NAMED_MAX)}"


def _free(worker: Any) -> str:
    return (
        f"{worker.coresFree()} of {worker.cores()} cores and {worker.memoryFree()} of {worker.memory()} MiB"
        f" on {worker.host()}"
    )
