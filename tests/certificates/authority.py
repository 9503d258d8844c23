"""A private certificate authority, and certificates for servers and clients that it signs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.programs.lacking import skip_without

SECONDS_MAX = 60
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its private key, as files in PEM form."""

    file: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority; `certificate` is what those who trust it have."""

    certificate: Certificate

    @property
    def file(self) -> Path:
        return self.certificate.file

    def sign(self, name: str, *, alternative: str = "", passphrase: str = "") -> Certificate:
        """A certificate with the common name `name`, for the host `alternative`: `IP:127.0.0.1`, `DNS:other`."""
        made = _files(self.file.parent, name)
        subject = ["-addext", f"subjectAltName={alternative}"] if alternative else []
        _openssl(
            "req", "-x509", *NEW_KEY, "-days", "2", "-subj", f"/CN={name}", *subject,
            "-addext", "basicConstraints=critical,CA:FALSE", "-CA", str(self.file), "-CAkey", str(self.certificate.key),
            "-keyout", str(made.key), "-out", str(made.file),
            *(["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]),
        )  # fmt: skip
        made.key.chmod(0o600)
        return made


def make_authority(folder: Path, name: str = "authority") -> Authority:
    """Make an authority in `folder`, whose certificates are beside its own; skip the test where there is no openssl."""
    if not shutil.which("openssl"):
        skip_without("openssl", "it makes the certificates")
    made = _files(folder, name)
    _openssl(
        "req", "-x509", *NEW_KEY, "-nodes", "-days", "2", "-subj", f"/CN={name}",
        "-keyout", str(made.key), "-out", str(made.file),
    )  # fmt: skip
    return Authority(made)


def _files(folder: Path, name: str) -> Certificate:
    return Certificate(folder / f"{name}.crt", folder / f"{name}.key")


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stderr
