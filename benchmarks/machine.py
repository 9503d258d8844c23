"""The environment of the measurements: versions and hardware, without names or paths of the machine."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from cutline.nodes.programs import run_tool

PACKAGES = ("cutline", "pyspark", "pyarrow", "psycopg", "adbc-driver-postgresql")


def environment() -> dict[str, object]:
    """Versions of all programs, CPU, cores, memory, and the current load."""
    return {
        "postgresql": run_tool("postgres", "--version").stdout.split()[-1],
        "python": platform.python_version(),
        "java": java_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def java_version() -> str:
    """The version of the Java that Spark uses, "none" if there is none."""
    from cutline.spark.java import find_java
    from cutline.storage.errors import SnapshotError

    try:
        with TemporaryDirectory() as folder:
            home = find_java(Path(folder)).launch_home
            command = [home / "bin" / "java", "-version"]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except (SnapshotError, OSError):
        return "none"
    return completed.stderr.partition('"')[2].partition('"')[0] or "unknown"


def package_version(name: str) -> str:
    """The installed version, "none" if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def cpu_model() -> str:
    """The processor's model name."""
    lines = Path("/proc/cpuinfo")
    if lines.exists():
        for line in lines.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as possible; return the new limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def resident_bytes() -> int:
    """The current resident memory of this process in bytes; resets its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def resident_bytes_max() -> int:
    """The peak since `resident_bytes` was called."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
