"""How long importing each package takes, and attaching it, in a fresh interpreter."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from figures import Figure, choose_size

ROUNDS = choose_size(9, 1)
PACKAGES = ("lightning_spans", "lightning_openai", "lightning_langchain", "lightning_trainer")
OTHERS = "10,000-19,000 ms wall (agentlightning 0.3)"
SHOW = "import time; {before}; a=time.process_time(); {statement}; print(time.process_time()-a)"
CASES = {f"import {name}": ("", f"import {name}") for name in PACKAGES} | {
    "attach() to openai, already imported": (
        "import openai, lightning_openai; openai.OpenAI(api_key='none')",
        "lightning_openai.attach()",
    ),
    "attach() to LangChain, already imported": (
        "import langchain_openai, langgraph.graph, lightning_langchain",
        "lightning_langchain.attach()",
    ),
    "the first span after attach(), until it lies in a local store": (  # what opening one costs beside the agent
        "import lightning_openai; live = lightning_openai.attach(); from lightning_spans import agent",
        "agent('writer').__enter__().end(); assert live.flush(60)",
    ),
}


def measure() -> list[Figure]:
    seconds: dict[str, list[float]] = {what: [] for what in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS + 1):  # the first round fills the caches of compiled modules
            for what, (before, statement) in CASES.items():
                show = SHOW.format(before=before or "pass", statement=statement)
                done = subprocess.run(
                    [sys.executable, "-c", show], capture_output=True, text=True, check=True, cwd=folder, env=os.environ
                )
                seconds[what].append(float(done.stdout))
    note = f"median of {ROUNDS} fresh interpreters, without Python's own start"
    return [
        Figure(
            what=what,
            value=1000 * statistics.median(times[1:]),
            unit="ms CPU",
            goal=500.0 if what.startswith("import") else None,
            others=OTHERS if what.startswith("import") else "",
            note=note,
        )
        for what, times in seconds.items()
    ]
