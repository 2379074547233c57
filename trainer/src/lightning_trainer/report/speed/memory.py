"""Memory of this process."""

from __future__ import annotations

import sys


def process_peak() -> int:
    """Return the peak memory of this process in bytes; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
