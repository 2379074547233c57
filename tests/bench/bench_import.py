"""How long importing each package takes, in a fresh interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys

from figures import Figure

ROUNDS = 9
PACKAGES = ("lightning_spans", "lightning_openai", "lightning_langchain", "lightning_trainer")
SHOW = "import time; a=time.process_time(); {statement}; print(time.process_time()-a)"


def measure() -> list[Figure]:
    statements = {name: f"import {name}" for name in PACKAGES}
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(ROUNDS + 1):  # the first round fills the caches of compiled modules
        for name, statement in statements.items():
            show = SHOW.format(statement=statement)
            done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
            seconds[name].append(float(done.stdout))
    return [
        Figure(
            what=f"import {name}",
            value=1000 * statistics.median(times[1:]),
            unit="ms CPU",
            goal=500.0,
            others="10,000-19,000 ms wall (agentlightning 0.3)",
            note=f"median of {ROUNDS} fresh interpreters, without Python's own start",
        )
        for name, times in seconds.items()
    ]
