"""Markers in the WAL of one primary, for tests without a cut."""

from __future__ import annotations

from typing import Any

import psycopg

from cutline.fleet.lsn import Lsn
from cutline.wal.cut.markers import Marker, write_markers


def write_marker(connection: psycopg.Connection[Any], marker: Marker) -> Lsn:
    """Write `marker` durably; return the position of its end."""
    return write_markers({"primary": connection}, marker)["primary"].position
