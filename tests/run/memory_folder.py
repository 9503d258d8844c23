"""Keep the embedded servers' data in memory, where creating and dropping databases takes about 4 % less.

A test server has hundreds of files per database, and none that matter if the machine stops. This applies only to short
runs as root on a machine with enough memory; other users' servers are in the folders of their tests.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import cutline.embedded.folder
from tests.run.soak import SOAK_SECONDS

MEMORY = Path("/dev/shm")
FREE_BYTES_MIN = 12 << 30


def pytest_configure() -> None:
    """Make the fleets that this process starts create their folders in memory."""
    if not SOAK_SECONDS and MEMORY.is_dir() and free_bytes() >= FREE_BYTES_MIN:
        cutline.embedded.folder.shared_temporary_directory = lambda: MEMORY


def free_bytes() -> int:
    """Return how many bytes can be written to MEMORY before memory runs short."""
    available = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return min(int(available[1]) * 1024 if available else 0, shutil.disk_usage(MEMORY).free)
