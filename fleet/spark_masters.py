"""What the address of a Spark master says of where tasks run."""

from __future__ import annotations

import re


def has_executors(master: str) -> bool:
    """Whether tasks run in processes other than the driver: all but `local` and `local[4]`."""
    return re.match(r"local(\[|$)", master) is None


def runs_on_this_machine(master: str) -> bool:
    """Whether driver and executors all run on this machine: `local`, `local[4]`, `local-cluster[2,1,1024]`.

    It says where their addresses and files are. What executors get is that of clusters wherever there are executors, so
    that a `local-cluster` shows what a cluster does.
    """
    return not has_executors(master) or master.startswith("local-cluster[")
