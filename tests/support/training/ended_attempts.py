"""A group of rollouts of a small program, run as a step of training runs them, and the batch made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.rollouts import Outcome, plan
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import SamplingOptions
from lightning_trainer.session.session import serve

SHORT_S, PATIENT_S = 4.0, 120.0  # enough for an answer, which takes milliseconds; never reached by what ends

PROGRAM = """
import collections, threading
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")

def ask(text, **options):
    with agent("writer"):
        reply = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0).chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], **options)
    return reply.choices[0].message.content

def run(task):
    said = ask("go")
    if said == "hang":
        threading.Event().wait()
    return 1.0 if said == "good" else 0.5

def impatient(task):
    return float(ask("go", timeout=task.get("limit_s", 120.0)) == "good")

def answer(task):
    return ask("go")

calls = collections.Counter()

def score(task, said):
    calls[said] += 1
    if said == "bad" or calls[said] == 1:
        raise ConnectionError("the judge is down")
    return None if said == "none" else 1.0

def unanswered(task):
    return ask("fail")

def twice(task, **options):
    said = ask("go")
    ask("wait", **options)
    return 1.0 if said == "good" else 0.5

def twice_impatient(task):
    return twice(task, timeout=task.get("limit_s", 120.0))

def calm(task, **options):
    # Takes 0 for an answer that it does not get.
    ask("go")
    for _ in range(task.get("tries", 1)):
        try:
            ask(task.get("text", "wait"), **options)
            return 1.0
        except openai.APIError:
            pass
    return 0.0

def calm_impatient(task):
    return calm(task, timeout=task.get("limit_s", 120.0))

def again(task):
    said = ask("go")
    try:
        ask("fail")
    except openai.InternalServerError:
        ask("go on")
    raise ValueError(said)
"""


def run_group(
    folder: Path,
    target: str,
    answers: AnswerSource,
    size: int,
    timeout_s: float = PATIENT_S,
    timeouts: Any = "count",
    reward: str | None = None,
    tries: int = 1,
    task: Mapping[str, Any] | None = None,
) -> tuple[list[Outcome], Batch]:
    """Run a group, one rollout after the other, and make the batch of a step of it. Only the first is short of time."""
    (folder / "slow_agent.py").write_text(PROGRAM)
    config = TrainConfig(target=f"slow_agent:{target}", data=folder, model="m", timeouts=timeouts)
    job = Job(target=f"slow_agent:{target}", reward=reward)
    runner = Runner(job, workers=1, concurrency=1, logs=folder / "logs", grace_s=0.2)
    runner.start()
    store = open_store(str(folder / "store.db"))
    try:
        options = SamplingOptions(answered=("writer",))
        with serve(store, runner, answers, options, timeouts=timeouts, failed=config.failed) as session:
            first, *rest = plan([{}], name="r:0", size=size, mode="train", max_attempts=tries, timeout_s=PATIENT_S)
            limit = {"limit_s": SHORT_S} if target.endswith("impatient") else {}
            rollouts = [replace(first, task=limit | dict(task or {}), timeout_s=timeout_s), *rest]
            outcomes = session.run(rollouts, Silent(), "rollouts")
        batch = algorithm_by_name("grpo").batch(config, outcomes, lambda ids: traces_of(store, attempt_ids=ids))
        return outcomes, batch
    finally:
        runner.stop()
        store.close()
