"""The other side of bench_queue, bench_ingest and bench_read: agentlightning 0.3, measured beside ours.

It lives in an environment of its own: BENCH_AGENTLIGHTNING_PYTHON names its Python (`nox -s bench` sets it).
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

MISSING = "agentlightning was not measured: set BENCH_AGENTLIGHTNING_PYTHON"


@cache
def measure(part: str) -> dict[str, float] | None:
    """Measure ``rollouts`` or ``spans``, a second, or ``read``, in seconds; None where it is not installed.

    Returns:
        The figure by the clock under the name of the part, and under ``PART_cpu`` for each second of the server's CPU,
        or in such seconds.
    """
    python = os.environ.get("BENCH_AGENTLIGHTNING_PYTHON")
    if not python:
        return None
    command = [python, "-W", "ignore", str(Path(__file__).with_name("agl_store.py")), part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"agentlightning's program failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def others(name: str, unit: str, elsewhere: str) -> str:
    """Say what it does here, and what was measured elsewhere."""
    found = measure(name.removesuffix("_cpu"))
    if found is None:
        return f"{elsewhere}; {MISSING}"
    return f"{found[name]:,.4g} {unit}: agentlightning 0.3.0 here, its store in memory; {elsewhere}"
