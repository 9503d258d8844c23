"""Azurite, Microsoft's emulator of Azure Blob Storage; `make stores` installs it and adlfs."""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.programs.cached import require_program
from tests.programs.lacking import lacking, skip_without
from tests.programs.npm_program import NpmProgram
from tests.s3.server import SECRET_KEY, free_port, running_server
from tests.stores.place import StorePlace

PROGRAM = NpmProgram("azurite", "3.35.0", "azurite-blob")
PACKAGE = "adlfs==2026.8.0"
ACCOUNT = "cutline"
KEY = base64.b64encode(SECRET_KEY.encode()).decode()


@contextlib.contextmanager
def azurite_server() -> Iterator[StorePlace]:
    """Run a server without containers that keeps objects in memory."""
    pytest.importorskip("adlfs", reason=lacking("adlfs", "to install it: make stores"))
    program = require_program("azurite-blob", PROGRAM.path())
    if shutil.which("node") is None:
        skip_without("node", "Azurite needs it on the PATH")
    port = free_port()
    # The client is newer than the server.
    command = [str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with running_server(command, port, settings={"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}):
        yield StorePlace("az", f"http://127.0.0.1:{port}", {"connection_string": connection_string(port)})


def with_shared_access(options: dict[str, object]) -> dict[str, object]:
    """Return `options` with a signature that, unlike the account's key, does not sign a request's headers."""
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    signature = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(container=True, object=True),
        AccountSasPermissions(read=True, write=True, list=True, delete=True, create=True),
        datetime.now(UTC) + timedelta(hours=1),
    )
    endpoint = str(options["connection_string"]).partition("BlobEndpoint=")[2]
    return {"connection_string": f"BlobEndpoint={endpoint}SharedAccessSignature={signature}"}


def connection_string(port: int) -> str:
    """Return the connection string of the server on a port of this machine."""
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};"
