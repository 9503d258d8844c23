"""An executor's answers about itself.

Spark sends the code of this module to executors that may lack Cutline or have a different build of it. So the module
imports nothing at the top, and its answers consist of plain values.
"""

from __future__ import annotations

from typing import Any


def examine(build: str, needs: bytes, _number: int) -> dict[str, Any]:
    """Examine this executor: host, process, versions and time; `lacks` names a module that can't be imported.

    If its build is `build`, it is tested for the job's `needs` (ExecutorNeeds, pickled): `problem` is an ErrorReport or
    None, and `key` is the key of the object that it stored, or "". `archive` is the reason why it can't use the archive
    from `snapshot cluster pack`, "" if it can or there is no archive.
    """
    import os
    import pickle
    import platform
    import socket
    import time

    # All workers on an executor have the same parent process.
    answer: dict[str, Any] = {"host": socket.gethostname(), "process": os.getppid(), "time": time.time()}
    answer |= {"python": platform.python_version(), "lacks": "", "build": "", "problem": None, "key": ""}
    answer["archive"] = os.environ.get("CUTLINE_ARCHIVE_PROBLEM", "")
    try:
        import pyarrow
        import pyspark

        answer |= {"pyarrow": pyarrow.__version__, "pyspark": pyspark.__version__}
        from cutline.spark.packing import build_digest

        answer["build"] = build_digest()
        if answer["build"] != build:
            return answer
        from cutline.spark.needs import check_needs

        problem, key = check_needs(pickle.loads(needs))  # Spark unpickles every task in the same way
        answer |= {"problem": problem, "key": key}
    except ImportError as error:
        answer["lacks"] = error.name or str(error)
    return answer
