"""The archive from `snapshot cluster pack`, which a session serves to executors that have not unpacked it yet.

Spark itself would send the archive to every executor of every command. Instead, Spark sends only a small daemon, which
learns the archive's digest through Spark's authenticated connections, and fetches the archive from here if its machine
lacks it. The archive contains only the code of Cutline and its packages. That code is public, so requests need no
authentication.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import IO, Any

from cutline.spark import archive_daemon
from cutline.storage.errors import RefusedError

ARCHIVE, PORT = "spark.cutline.archive", "spark.cutline.archive.port"
HOST, BIND_ADDRESS = "spark.driver.host", "spark.driver.bindAddress"
FILES, PYTHON_PATH, DAEMON = "spark.files", "spark.executorEnv.PYTHONPATH", "spark.python.daemon.module"
SILENT_SECONDS_MAX = 60


class PackedArchiveError(RefusedError):
    """The archive can't be read or served."""


class ServedArchive:
    """The archive, served until `close`, and the `settings` with which executors find it.

    `host` is the driver's host as executors reach it. Raises PackedArchiveError.
    """

    def __init__(self, settings: Mapping[str, str], host: str) -> None:
        file = Path(settings[ARCHIVE])
        try:
            # Keep the file open, because a new archive may replace it at any time.
            self._body = file.open("rb")
            digest = hashlib.file_digest(self._body, "sha256").hexdigest()
        except OSError as error:
            raise PackedArchiveError(
                f"the archive {file} can't be read: {error.strerror or error}",
                hint="run: snapshot cluster pack FILE   then name that file in [spark] of fleet.toml: docs/cluster.md",
            ) from error
        place = settings.get(BIND_ADDRESS) or host
        try:
            self._server = _ArchiveServer(_unbracketed(place), int(settings.get(PORT, "0")), digest, self._body)
        except (OSError, ValueError, OverflowError) as error:
            self._body.close()
            raise PackedArchiveError(
                f"the archive {file} can't be served at {place}, port {settings.get(PORT, '0')}: {error}",
                hint="correct driver.bindAddress or cutline.archive.port in [spark] of fleet.toml",
            ) from error
        daemon = Path(archive_daemon.__file__)
        self.settings = {
            FILES: ",".join(filter(None, [settings.get(FILES), daemon.as_uri()])),
            DAEMON: daemon.stem,
            # Spark puts files into the executor's working directory.
            PYTHON_PATH: ":".join(filter(None, [".", settings.get(PYTHON_PATH)])),
            f"spark.executorEnv.{archive_daemon.DIGEST}": digest,
            f"spark.executorEnv.{archive_daemon.URL}": f"http://{host}:{self._server.server_port}/{digest}",
        }
        threading.Thread(target=self._server.serve_forever, name="archive for executors", daemon=True).start()

    def close(self) -> None:
        """Stop serving the archive."""
        self._server.shutdown()
        self._server.server_close()
        self._body.close()


class _ArchiveServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, digest: str, body: IO[bytes]) -> None:
        self.path, self.body = f"/{digest}", body
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        """Bind as TCPServer does: HTTPServer would also look up the host's name, which may take a long time."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Request(BaseHTTPRequestHandler):
    timeout = SILENT_SECONDS_MAX
    server: _ArchiveServer

    def do_GET(self) -> None:
        if self.path != self.server.path:
            self.send_error(404)
            return
        body = self.server.body
        self.send_response(200)
        self.send_header("Content-Length", str(os.fstat(body.fileno()).st_size))
        self.end_headers()
        self.connection.sendfile(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _unbracketed(host: str) -> str:
    """Remove the brackets that Spark puts around IPv6 addresses; sockets don't accept them."""
    return host.removeprefix("[").removesuffix("]")
