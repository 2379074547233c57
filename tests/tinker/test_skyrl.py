"""A real Tinker server: SkyRL on a CPU with a tiny float32 model (`nox -s tinker`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from lightning_spans.store import open_store
from lightning_trainer import TrainConfig, train
from lightning_trainer.backends.tinker.adapter import Adapter
from lightning_trainer.backends.tinker.describe import describe
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.learner import TinkerLearner
from lightning_trainer.backends.tinker.options import make
from lightning_trainer.backends.torch.learn.policy import TrainedWeights
from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.kits.sft.dpo import Dpo
from lightning_trainer.lineage.reading import read_lineage
from lightning_trainer.rl.rows import Row
from lightning_trainer.run.group_ids import step_of
from support.models.tiny import make_tiny_model
from support.training.programs import CLIENT, folder_with

SERVE = Path(__file__).with_name("serve_skyrl.py")
PYTHON = os.environ.get("SKYRL_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs SkyRL in an environment of its own: nox -s tinker"),
    pytest.mark.timeout(1800),
]
EPSILON = 1e4  # an optimiser step with such an epsilon moves the weights by the gradient


class SkyRL:
    """The server as processes of its own: it can be killed and started again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        cache = os.environ.get("SKYRL_CACHE", str(self._folder / "jax"))
        more = {
            "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, str(SERVE), str(self._model), str(self._folder), str(self._port)],
                env={**os.environ, **more}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/api/v1/healthz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny").resolve()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyRL]:
    running = SkyRL(model, tmp_path_factory.mktemp("skyrl"))
    running.start()
    yield running
    running.kill()


def row(random: np.random.Generator, length: int, policy: str = "writer") -> Row:
    mask = np.zeros(length, bool)
    mask[3 : 3 + (length - 3) // 2] = True
    mask[-2:] = True
    first = int(mask.sum()) // 2
    return Row(
        tokens=random.integers(3, 250, length).astype(np.int32), mask=mask,
        logprobs=np.where(mask, random.uniform(-7, -4, length), 0.0).astype(np.float32),
        advantages=np.where(mask, random.normal(0, 1, length), 0.0), lengths=(first, int(mask.sum()) - first),
        agent=policy, attempt_id=f"a{length}", rollout_id=f"r{length}", group_id="g", policy=policy,
    )  # fmt: skip


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {}, "dapo": {"clip_dual": 3.0}, "rloo": {"loss_aggregation": "sequence-mean"},
    "gspo": {"clip_low": 3.0, "clip_high": 4.0, "loss_aggregation": "sequence-mean"},
    "cispo": {"clip_low": 1.0}, "reinforce++": {"clip_high": 0.2},
    "distil": {"old_logprobs": "recompute"}, "likelihood": {}, "dpo": {"loss_aggregation": "sequence-sum"},
}  # fmt: skip


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter_model.safetensors")


def torch_gradient(
    folder: Path, rows: Sequence[Row], monkeypatch: Any, start: Path | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """The gradient of the torch backend at a checkpoint of one adapter; with a start, that of DPO."""
    found: dict[str, np.ndarray] = {}

    def keep(policy: TrainedWeights) -> tuple[float, bool]:
        for name, master in policy.masters.items():
            if master.grad is not None:
                found[name] = master.grad.numpy().copy()
        return 0.0, True

    monkeypatch.setattr(TrainedWeights, "step", keep)
    learner = TorchLearner(folder, device="cpu", dtype="float32", **options)
    reference = TorchLearner(start, device="cpu", dtype="float32") if start is not None else None
    try:
        learns_from(learner, rows, reference)
    finally:
        for each in (learner, reference):
            if each is not None:
                each.close()
    return found


def learns_from(learner: Any, rows: Sequence[Row], reference: Any = None) -> None:
    """Learn from rows; with a reference, prefer the first to the second and the third to the fourth, by DPO."""
    if reference is None:
        learner.update(rows)
        return
    named = [replace(each, attempt_id=str(number // 2)) for number, each in enumerate(rows)]
    dpo = Dpo(reference, list(zip(named[::2], named[1::2], strict=True)), beta=0.5)
    dpo._learner = learner
    dpo.update(named[::2])


def norm(gradient: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((its.astype(float) ** 2).sum() for its in gradient.values())))


def short(name: str) -> str:
    """A weight's name without what peft and transformers put around it."""
    parts = name.removeprefix("base_model.model.").replace(".default.", ".").replace(".writer.", ".")
    return parts.removeprefix("model.").removesuffix(".weight")


def test_gradients_are_those_of_torch(server: SkyRL, model: Path, tmp_path: Path, monkeypatch) -> None:
    batch = [row(np.random.default_rng(seed), length) for seed, length in enumerate((9, 30, 14, 5))]
    given = make(str(model), {"tinker_url": server.url, "lora_rank": 4, "adapters": ("writer",)})
    learner, step = TinkerLearner(given), Adapter.step
    try:
        learner.update(batch)  # B is zero before, and A has no gradient
        learner.save(tmp_path / "start")
        plain = {"beta1": 0.0, "beta2": 0.0, "learning_rate": EPSILON, "eps": EPSILON}
        start, far = weights(tmp_path / "start/writer"), {}
        for name, options in LOSSES.items():
            learner.load(tmp_path / "start")
            algorithm = "likelihood" if name == "dpo" else name
            learner.learner_options = replace(learner.options.learner, algorithm=algorithm, **options)
            untrained = TinkerLearner(given) if name == "dpo" else None
            with monkeypatch.context() as patch:
                patch.setattr(Adapter, "step", lambda self, **_: step(self, **plain))
                learns_from(learner, batch, untrained)
            if untrained is not None:
                untrained.save(tmp_path / "untrained")
                untrained.close()
            learner.save(tmp_path / name)
            moved = {short(key): start[key] - its for key, its in weights(tmp_path / name / "writer").items()}
            with monkeypatch.context() as patch:
                known = None if untrained is None else tmp_path / "untrained"
                found = torch_gradient(tmp_path / "start", batch, patch, known, algorithm=algorithm, **options)
            wanted = {short(key): its for key, its in found.items()}
            assert moved.keys() == wanted.keys()
            assert norm(wanted) > 1e-3
            far[name] = norm({key: moved[key] - its for key, its in wanted.items()}) / norm(wanted)
        print(far)
        assert max(far.values()) < 1e-4
    finally:
        learner.close()


def test_doctor_measures_what_is_known_of_skyrl(server: SkyRL) -> None:
    told = describe(server.url)
    assert (told["averages"], told["clips"], told["snapshots"]) == ("tokens and sequences of a step", False, False)
    assert (told["adapters"], told["fits"]) == (2, True)
    assert {"cross_entropy", "importance_sampling", "ppo", "cispo"} <= set(told["losses"])


AGENT = (
    CLIENT
    + '''
def say(name, text):
    with agent(name):
        reply = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], max_tokens=8, logprobs=True
        )
    return [token.logprob is not None and token.token for token in reply.choices[0].logprobs.content]

def run(task):
    """Each agent is paid for the share of its tokens that are small letters."""
    found = {name: say(name, task["q"]) for name in ("writer", "checker")}
    return {name: sum(t.islower() for t in tokens) / max(1, len(tokens)) for name, tokens in found.items()}
'''
)


folder = folder_with(2, letters_agent=AGENT)


def options(server: SkyRL, model: Path, **more: Any) -> TrainConfig:
    given = {
        "target": "letters_agent:run", "data": "tasks.jsonl", "model": str(model), "backend": "tinker", "out": "out",
        "tinker_url": server.url, "policies": "writer=lora,checker=lora", "lora_rank": 4, "learning_rate": 0.003,
        "batch_size": 2, "group_size": 16, "workers": 1, "save_every": 1, "backend_options": {"down_s": 10.0},
    }  # fmt: skip
    return TrainConfig(**{**given, **more})


def steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    if not (folder / "metrics.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_two_agents_learn_on_two_adapters(server: SkyRL, model: Path, folder: Path) -> None:
    result = train(options(server, model, steps=16))
    told = [line["reward"] for line in steps(folder / "out")]
    assert np.mean(told[-2:]) > np.mean(told[:2]) + 0.1, told
    learner = TorchLearner(result.checkpoint, device="cpu", dtype="float32")
    assert [engine.model for engine in learner.engines] == ["base", "writer", "checker"]
    learner.close()


def test_two_runs_share_a_server(server: SkyRL, model: Path, tmp_path: Path) -> None:
    """Each learns as if it were alone."""

    def learn(seed: int, found: dict[int, list[np.ndarray]]) -> None:
        batch = [row(np.random.default_rng(seed), 14)]
        learner = TinkerLearner(make(str(model), {"tinker_url": server.url, "lora_rank": 4, "adapters": ("writer",)}))
        for _ in range(3):
            learner.update(batch)
        found[seed] = learner.logprobs(batch)
        learner.close()

    alone: dict[int, list[np.ndarray]] = {}
    together: dict[int, list[np.ndarray]] = {}
    for seed in (1, 2):
        learn(seed, alone)
    threads = [threading.Thread(target=learn, args=(seed, together)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.allclose(alone[seed][0], together[seed][0], atol=1e-4) for seed in (1, 2))


@pytest.mark.parametrize("staleness", [0, 1])
def test_server_that_is_killed_ends_the_run_which_resumes_and_learns_from_each_call_once(
    staleness: int, server: SkyRL, model: Path, folder: Path, monkeypatch
) -> None:
    """With staleness, calls of the next step's batch are sampled before each update, and after it."""
    learn, gradient, killed = TinkerLearner.update, Adapter.gradient, threading.Event()

    def update(self: TinkerLearner, rows: Sequence[Row]) -> dict[str, float]:
        while staleness and not of_next_step(folder / "out"):
            time.sleep(0.05)
        return learn(self, rows)

    def gradient_or_kill(self: Adapter, *given: Any, **more: Any) -> None:
        if len(steps(folder / "out")) == 2 and not killed.is_set():
            killed.set()
            server.kill()
        gradient(self, *given, **more)

    monkeypatch.setattr(TinkerLearner, "update", update)
    monkeypatch.setattr(Adapter, "gradient", gradient_or_kill)
    with pytest.raises(TinkerError, match="has not answered for 10 s"):
        train(options(server, model, steps=4, staleness=staleness))
    state = json.loads((folder / "out/checkpoint/state.json").read_text())
    assert (killed.is_set(), state["step"]) == (True, 2)
    server.start()
    result = train(options(server, model, out=None, resume="out", steps=4, staleness=staleness))
    told = steps(result.folder)
    assert result.steps == len(told) == 4
    late = [0.0, 1.0, 0.0, 1.0]  # a run that begins or resumes has queued nothing ahead
    assert [line["staleness_max"] for line in told] == (late if staleness else [0.0] * 4)
    assert_learned_once(result.folder, told)


def of_next_step(folder: Path) -> bool:
    """Whether a call is recorded of the step after the one that learns, or there is no such step."""
    number = len(steps(folder)) + 1
    with closing(open_store(str(folder / "lightning.db"))) as store:
        return number == 4 or any(
            step_of((call.rollout_id or "").rpartition("-")[0]).number == number for call in store.calls()
        )


def assert_learned_once(folder: Path, told: Sequence[dict[str, Any]]) -> None:
    """Each call that a step learned from is in no other step, and is recorded with the version that sampled it."""
    learned = read_lineage(folder / "checkpoint").steps
    assert max(Counter(call for step in learned for call in step["calls"]).values()) == 1
    with closing(open_store(str(folder / "lightning.db"))) as store:
        sampled = {call.call_id: call.policy_version for call in store.calls()}
    for number, (step, metrics) in enumerate(zip(learned, told, strict=True)):
        assert len(step["calls"]) == metrics["calls_trained"] == 2 * 16 * 2, "two agents, nothing dropped"
        versions = {sampled[call] for call in step["calls"]}
        assert (min(versions), max(versions) <= number) == (number - metrics["staleness_max"], True)
