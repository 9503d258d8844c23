"""How Spark's own connections are protected: every process of a session proves that it knows a secret, and encrypts.

A driver listens even if everything runs on one machine, where other users could connect to it; so authentication is
always on. A cluster is also on a network and writes to the disks of other machines: there, nothing of this can be
switched off, nor at a `local-cluster`, which is there to try what a cluster does. What runs on a cluster is described
in Spark's manual, "Security". Nothing here starts anything.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from cutline.fleet.settings import JAVA_OPTIONS, secrets_in_options
from cutline.fleet.spark_masters import has_executors
from cutline.storage.errors import UsageError, remember_secret

AUTHENTICATE = "spark.authenticate"
SECRET = "spark.authenticate.secret"
SECRET_FILE = "spark.authenticate.secret.file"
# These hand every session a secret of its own.
MAKE_SECRETS = ("k8s://", "yarn")
# Version 2 derives its keys as it should, and GCM notices changed bytes: Spark's defaults do neither, to fit old peers.
PROTECTION = {
    AUTHENTICATE: "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}
# What no fleet.toml may switch off where there are executors. Spark's pages know no passwords.
REQUIRED_ON_A_CLUSTER = {
    AUTHENTICATE: "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
    "spark.ui.enabled": "false",
}


class SparkUnprotectedError(UsageError):
    """The settings in [spark] would let others on the network read or join the session, or show a secret."""


def check_protection(master: str, given: Mapping[str, str]) -> None:
    """Raise SparkUnprotectedError if `given`, the settings of fleet.toml, leave a session at `master` unprotected."""
    for name, value in given.items():
        is_shown = name.endswith(JAVA_OPTIONS) and not name.startswith("spark.driver.")
        if is_shown and any(secrets_in_options(value)):
            raise SparkUnprotectedError(
                f"{name} seems to contain a secret, which Spark would put on a command line",
                hint="put the option into a file on the machines of the executors, and name that: @/path/of/file",
                details={"setting": name},
            )
    if not has_executors(master):
        return
    for name, required in REQUIRED_ON_A_CLUSTER.items():
        if given.get(name, required).strip().lower() != required:
            raise SparkUnprotectedError(
                f"{name} must be {required} at {master}: rows and credentials travel to its executors",
                hint=f"remove {name.removeprefix('spark.')} from [spark] in fleet.toml;"
                " the cluster needs the same settings: docs/spark.md",
                details={"setting": name},
            )
    if not _needs_shared_secret(master) or given.get(SECRET):
        return
    if not given.get(SECRET_FILE):
        raise SparkUnprotectedError(
            f"there is no {SECRET} for {master}: rows and credentials travel to its executors",
            hint='set authenticate.secret = "${VARIABLE}" or authenticate.secret.file in [spark] of fleet.toml to the'
            " secret of the cluster: docs/spark.md",
            details={"setting": SECRET},
        )
    _read_secret(Path(given[SECRET_FILE]))


def protection_settings(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """The settings that protect a session at `master`, for those that `given` lacks; raises SparkUnprotectedError."""
    check_protection(master, given)
    settings = PROTECTION | REQUIRED_ON_A_CLUSTER if has_executors(master) else PROTECTION
    if master.startswith(MAKE_SECRETS):
        return dict(settings)
    if _needs_shared_secret(master) and not given.get(SECRET):
        return settings | {SECRET: _read_secret(Path(given[SECRET_FILE]))}
    return settings | {SECRET: secrets.token_hex(32)}


def _needs_shared_secret(master: str) -> bool:
    """Whether all sessions share the secret of the cluster, with its masters and workers."""
    return master.startswith("spark://")


def _read_secret(path: Path) -> str:
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SparkUnprotectedError(
            f"{SECRET_FILE}: {path} can't be read: {reason}", hint="name a file with the secret of the cluster"
        ) from error
    if not secret:
        raise SparkUnprotectedError(
            f"{SECRET_FILE}: {path} is empty", hint="name a file with the secret of the cluster"
        )
    remember_secret(secret)
    return secret
