"""Rollback under load: until the last answer of the candidate has ended, with 64 streams under way."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import openai
import tests_path  # noqa: F401 - for support
from figures import Figure, choose_size

from lightning_spans.store import open_store
from lightning_trainer.kits.deploy.serving import deploying
from lightning_trainer.kits.deploy.table import keep
from lightning_trainer.kits.deploy.transitions import Note, Policy, begin_canary, name_candidate, roll_back
from support.fakes import FakeEngine, Served, served

STREAMS = choose_size(64, 8)
NOTE = Note("measured", "bench")


def measure() -> list[Figure]:
    """Measure."""
    engines = [FakeEngine(lambda _: "old" * 8, model="old"), FakeEngine(lambda _: "new" * 8, model="new")]
    for engine in engines:
        engine._delay_s = 0.05  # a stream lasts 0.3 s
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), engine=engines) as server:  # type: ignore[arg-type]
        history = [name_candidate(None, "writer", Policy("new"), NOTE, stable="old")]
        history.append(begin_canary(history[-1], "writer", 1.0, NOTE))
        for deployment in history:
            keep(server.store, deployment)
        with deploying(server.app):
            return _roll_back(server, Path(folder), history)


def _roll_back(server: Served, folder: Path, history: list) -> list[Figure]:
    key, stop = server.keys.issue("caller"), threading.Event()
    answers: list[tuple[float, float, str]] = []  # when each began and ended, and what it said
    lost: list[str] = []

    def talk(name: str) -> None:
        headers = {"x-lightning-conversation": name, "x-lightning-agent": "writer"}
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, default_headers=headers, max_retries=0)
        while not stop.is_set():
            began = time.monotonic()
            try:
                chunks = client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            except openai.OpenAIError as error:
                lost.append(str(error))
                continue
            answers.append((began, time.monotonic(), said[:3]))

    threads = [threading.Thread(target=talk, args=(f"c{number}",)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    while len(answers) < 2 * STREAMS:
        time.sleep(0.01)
    with closing(open_store(str(folder / "server.db"))) as another:
        asked = time.monotonic()
        keep(another, roll_back(history, "writer", NOTE))
    while sum(said == "old" for *_, said in answers) < 4 * STREAMS:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    last = max(ended for _, ended, said in answers if said == "new")
    note = f"{STREAMS} streams at once, {len(answers)} answers; wall time"
    return [
        Figure(
            what="rollback: the candidate's last answer has ended", value=last - asked, unit="s", goal=5.0, note=note
        ),
        Figure(what="rollback: requests lost", value=float(len(lost)), unit="", goal=0.0, note=note),
    ]
