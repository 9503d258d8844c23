"""What values of fleet.toml must not be although its form allows them.

Each function raises ValueError that names the key; load_fleet makes it a FleetFileError. What concerns several nodes is
checked where these are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.fleet_file import WatchTable

DEPLOY_MODE = "spark.submit.deployMode"
REMOTE, API_MODE, CLASSIC = "spark.remote", "spark.api.mode", "classic"
# Spark looks for the image only when it makes the first executor, and then goes on without one.
IMAGES = ("spark.kubernetes.container.image", "spark.kubernetes.executor.container.image")
# An increment of an idle fleet takes about half a second.
EVERY_SECONDS_MIN = 10
GLOBAL_ID_FORMS = ("exact", "xa", "citus")


def check_global_id(rule: str) -> None:
    """Check `cut.global_id`: the name of a form, or a regex with a group of the global id."""
    if rule in GLOBAL_ID_FORMS:
        return
    try:
        groups = re.compile(rule).groupindex
    except re.error as error:
        raise ValueError(f"cut.global_id is not exact, xa or citus, nor a valid regex: {error}") from error
    if "global" not in groups:
        raise ValueError(f"cut.global_id: the regex {rule!r} has no group named global: (?P<global>…)")


def check_dsn(key: str, dsn: str, *, is_primary: bool) -> str:
    """Return the dsn; if it names several hosts, with the kind of server that the node is."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    if "replication" in given:
        raise ValueError(f"{key} has replication, which Cutline asks for itself where it needs it: remove it")
    # Without that, libpq takes the first host that answers, and each session may come to another server.
    if any("," in given.get(name, "") for name in ("host", "hostaddr")) and "target_session_attrs" not in given:
        return make_conninfo(dsn, target_session_attrs="primary" if is_primary else "standby")
    return dsn


def check_spark_master(master: object) -> str:
    """Return `spark.master` if jobs can run there."""
    if not isinstance(master, str) or not master:
        raise ValueError("`spark.master` must be a non-empty string")
    if master.startswith("sc://"):
        raise ValueError(
            "`spark.master` is a Spark Connect server, which lacks what jobs need; name the cluster's master"
        )
    return master


def check_spark_settings(master: str, settings: Mapping[str, str]) -> None:
    """Check that the command is the driver, with a JVM of its own, and that Kubernetes knows the executors' image."""
    for name in (REMOTE, API_MODE):
        if settings.get(name, CLASSIC).strip().lower() != CLASSIC:
            raise ValueError(f"`{name}` leads to Spark Connect, which lacks what jobs need: remove it")
    if settings.get(DEPLOY_MODE, "client").strip().lower() != "client":
        raise ValueError(
            f"`{DEPLOY_MODE}` must be client: the command is the driver; in a cluster, run it in a pod or a container"
        )
    if master.startswith("k8s://") and not any(settings.get(name) for name in IMAGES):
        raise ValueError(f"`{IMAGES[0]}` is missing: the image in which {master} runs executors (docs/kubernetes.md)")


def check_watch(table: WatchTable | None) -> WatchTable | None:
    """Return `[watch]` if nothing in it is more often than increments, and these are not too often."""
    if table is None:
        return None
    if table.every < EVERY_SECONDS_MIN:
        raise ValueError(f"`watch.every` is less than {EVERY_SECONDS_MIN} s")
    for name, interval in (("full", table.full), ("check", table.check), ("drill", table.drill)):
        if 0 < interval < table.every:
            raise ValueError(f"`watch.{name}` is more often than `watch.every`")
    return table
