"""Which allocator Arrow uses in our processes: the C library's.

Arrow's own ones keep freed memory, and copy a large buffer that grows. With values of hundreds of megabytes a process
would take a whole one more (measured); with small ones there is no difference. Arrow reads the variable when it is
loaded.
"""

from __future__ import annotations

import os

VARIABLE, SYSTEM = "ARROW_DEFAULT_MEMORY_POOL", "system"


def choose_allocator() -> None:
    """Set the variable for this process and those that it starts, unless the user has."""
    os.environ.setdefault(VARIABLE, SYSTEM)
