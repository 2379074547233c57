"""Whole runs with vLLM as the engine: a server with its interface in a process of its own, adapters by version."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.store import open_store

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_trainer import train
from lightning_trainer.backends.torch.sampler import engine_name, engine_of
from lightning_trainer.engines.contract import EngineRequest, HeldModel
from lightning_trainer.engines.devices import gpu_totals
from lightning_trainer.engines.vllm import folders, kind, process
from lightning_trainer.engines.vllm.guard import KeyGuard
from lightning_trainer.engines.vllm.kind import OwnServer, _given_options
from lightning_trainer.engines.vllm.policies import VllmPolicies
from lightning_trainer.engines.vllm.process import VllmProcess, command_of, environment_of, last_error
from support.models.tiny import make_tiny_model
from support.training.engines import answer_under_grammar
from support.training.opponents import AGAINST, frozen_calls, largest_gap
from support.training.policies import calls, config, digest, folder, lines  # noqa: F401 - a fixture among them

TESTS = Path(__file__).parents[1]


def most_loaded(events):
    now, most = set(), 0
    for event in events:
        now = set() if "start" in event else (now | {event.get("load")}) - {None, event.get("unload")}
        most = max(most, len(now))
    return most


def test_two_adapters_learn_from_what_vllm_samples_and_none_is_left_loaded(tiny_model, folder, scripted):  # noqa: F811
    train(config(tiny_model, engine="vllm", steps=4))
    events, metrics = scripted(), lines(folder / "out")
    begun = next(event["start"] for event in events if "start" in event)
    assert begun[begun.index("--max-loras") + 1] == "4", "of each policy the newest and the one to come"
    assert begun[begun.index("--max-lora-rank") + 1] == "8"
    assert "--no-enable-chunked-prefill" in begun, "its CPU build ends at a seeded prompt that is read in parts"
    targets = begun[begun.index("--lora-target-modules") + 1 :]
    assert "q_proj" in targets
    assert "lm_head" not in targets, "its CPU build ends at a prompt that is scored next to other requests"
    assert most_loaded(events) <= 4
    for step, line in enumerate(metrics):
        for name in ("writer", "rewriter"):
            assert line[f"engine_gap/{name}"] < 1e-3
            assert line[f"engine_correlation/{name}"] > 0.999
            assert line[f"policy_version/{name}"] == step + 1
    versions = {(call.policy, call.policy_version) for call in calls(folder / "out")}
    assert versions == {("base", 0), *((name, step) for name in ("writer", "rewriter") for step in range(4))}
    assert {event["answer"].partition(".")[0] for event in events if "answer" in event} == {
        "base",
        *(f"{name}@{step}" for name in ("writer", "rewriter") for step in range(4)),
    }


def test_vllm_answers_with_the_frozen_weights_of_opponents(tiny_model, folder, scripted):  # noqa: F811
    train(config(tiny_model, **AGAINST, engine="vllm", steps=4))
    events, out = scripted(), folder / "out"
    begun = next(event["start"] for event in events if "start" in event)
    assert begun[begun.index("--max-loras") + 1] == "8", "as without opponents, two copies and one to come of each"
    assert most_loaded(events) <= 8
    answered = {(call.policy, call.policy_version) for call in frozen_calls(out)}
    assert len(answered) > 1
    served = {event["answer"].partition(".")[0] for event in events if "answer" in event}
    assert {name for name in served if "past" in name} == {f"{policy}@{version}" for policy, version in answered}
    assert largest_gap(tiny_model, out) < 1e-3


@pytest.mark.parametrize("fault", ["crash", "again", "scoring", "port", "hang"])
def test_a_vllm_that_ends_is_started_again_with_the_newest_adapters(tiny_model, folder, scripted, monkeypatch, fault):  # noqa: F811
    monkeypatch.setenv("SCRIPTED_FAULT", fault)
    if fault == "hang":
        monkeypatch.setattr(process, "_FROZEN_S", 5.0)
    train(config(tiny_model, engine="vllm", steps=3, max_attempts=4))
    events, metrics = scripted(), lines(folder / "out")
    lives = list(dict.fromkeys(event["pid"] for event in events))
    assert len(lives) == (1 if fault == "port" else 2), "of those that answered"
    second = [event for event in events if event["pid"] == lives[-1]]
    newest = [event["load"].partition(".")[0] for event in second[1:3]]
    version = {"port": 0}.get(fault, 1)
    assert newest == [f"writer@{version}", f"rewriter@{version}"]
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert [line["policy_version/writer"] for line in metrics] == [1, 2, 3]
    assert all(line["failed"] == 0 for line in metrics)
    trained = [line["calls_trained"] for line in metrics]
    assert trained == [12, 12, 12], "each call is trained once"


def test_a_program_that_takes_0_for_an_answer_that_broke_off_is_not_learned_from(
    tiny_model,
    folder,  # noqa: F811
    scripted,
    monkeypatch,
):
    monkeypatch.setenv("SCRIPTED_FAULT", "crash")
    train(config(tiny_model, target="policy_agent:calm", engine="vllm", steps=3, max_attempts=100))
    metrics = lines(folder / "out")
    assert sum(line.get("infrastructure/engine_down", 0) for line in metrics) >= 1
    assert [line["calls_trained"] for line in metrics] == [12, 12, 12], "both calls of each rollout"
    broken = [call for call in calls(folder / "out") if call.error is not None]
    assert broken
    assert all(call.sampling["engine_ended"] for call in broken)


def test_a_broken_answer_of_a_vllm_that_lives_on_counts_with_the_reward_of_the_program(
    tiny_model,
    folder,  # noqa: F811
    scripted,
    monkeypatch,
):
    """The policy can bring it about, for example by a request that vLLM cannot answer."""
    monkeypatch.setenv("SCRIPTED_FAULT", "broken")
    monkeypatch.setattr(process, "_ENDING_S", 0.5)
    train(config(tiny_model, target="policy_agent:calm", engine="vllm", steps=3))
    (broken,) = [call for call in calls(folder / "out") if call.error is not None]
    assert "ended its answer before it was complete" in broken.error
    assert "engine_ended" not in broken.sampling
    metrics = lines(folder / "out")
    assert all(line.get("infrastructure/engine_down", 0) == 0 for line in metrics)
    assert sum(line["failed"] for line in metrics) == 0
    assert len({event["pid"] for event in scripted()}) == 1


def end_outage(out, back):
    """Let vLLM come back once an attempt has run out of time."""
    while not out.exists():
        time.sleep(0.1)
    store = open_store(str(out))
    while not any(attempt.status == "timeout" for attempt in store.attempts()):
        time.sleep(0.1)
    store.close()
    back.touch()


def test_attempts_that_run_out_of_time_while_vllm_restarts_are_not_learned_from(
    tiny_model,
    folder,  # noqa: F811
    scripted,
    monkeypatch,
):
    monkeypatch.setenv("SCRIPTED_FAULT", "outage")
    back = Path(os.environ["SCRIPTED_LOG"]).with_suffix(".back")
    threading.Thread(target=end_outage, args=(folder / "out" / "lightning.db", back), daemon=True).start()
    train(config(tiny_model, engine="vllm", steps=3, timeout_s=30, max_attempts=100))
    metrics = lines(folder / "out")
    assert sum(line.get("infrastructure/engine_down", 0) for line in metrics) >= 1
    assert all(line["failed"] == 0 for line in metrics)
    assert [line["calls_trained"] for line in metrics] == [12, 12, 12], "each rollout counts, by the try that ended"


@pytest.mark.parametrize("fault", ["", "crash"])
def test_all_weights_learn_and_vllm_forgets_what_earlier_ones_computed(folder, scripted, monkeypatch, fault):  # noqa: F811
    monkeypatch.setenv("SCRIPTED_FAULT", fault)
    model = make_tiny_model(folder / "untied", tie_word_embeddings=False)
    train(config(model, engine="vllm", policies={}, lora_rank=0, steps=3, max_attempts=4))
    events, metrics = scripted(), lines(folder / "out")
    assert [line["policy_version"] for line in metrics] == [1, 2, 3]
    assert all(line["failed"] == 0 for line in metrics)
    for line in metrics:
        assert line["engine_gap/untied"] < 1e-3
        assert line["engine_correlation/untied"] > 0.999
    assert {call.policy_version for call in calls(folder / "out")} == {0, 1, 2}
    kinds = [kind for event in events for kind in event if kind in ("replace", "forget")]
    assert kinds == ["replace", "forget"] * (4 + (fault == "crash")), "at first, after each step, after a crash"


@pytest.fixture
def small_gpu(tmp_path, monkeypatch):
    """A GPU of so much memory that vLLM and the learner of the tiny model fit one after the other, not side by side."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 3788\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return {"device": "auto", "backend_options": {"micro_batch_tokens": 65_536, "activation_checkpointing": "off"}}


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("fault", ["", "asleep", "waking", "sending"])
def test_vllm_sleeps_while_the_learner_learns_if_memory_is_short(
    folder,  # noqa: F811
    scripted,
    monkeypatch,
    small_gpu,
    fault,
    rank,
):
    monkeypatch.setenv("SCRIPTED_FAULT", fault)
    policies = {} if rank else {"policies": {}, "lora_rank": 0}
    model = make_tiny_model(folder / "untied", tie_word_embeddings=False)
    train(config(model, engine="vllm", steps=3, **small_gpu, **policies))
    events, metrics = scripted(), lines(folder / "out")
    assert not [event for event in events if "while_asleep" in event]
    first = next(event["start"] for event in events if "start" in event)
    assert "--enable-sleep-mode" in first
    lives = len({event["pid"] for event in events})
    assert lives == 1 + bool(fault), "one that crashed asleep, or later in the update, is started again"
    slept = [kind for event in events for kind in event if kind in ("sleep", "wake")]
    expected = ["sleep", "wake"] * 3
    assert slept in (expected, expected[:1] + expected[2:]), "a server that was started again was awake"
    assert [line["step"] for line in metrics] == [0, 1, 2]
    for line in metrics:
        assert line["failed"] == 0
        assert all(value < 1e-3 for name, value in line.items() if name.startswith("engine_gap/"))


RUN = """
import json, os, sys
from lightning_trainer import train
from support.training.policies import config
os.environ["SCRIPTED_TRAINER"] = str(os.getpid())
train(config(sys.argv[1], **json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize("rank", [4, 0])
def test_a_run_that_died_while_vllm_slept_resumes_and_trains_nothing_twice(
    folder,  # noqa: F811
    scripted,
    monkeypatch,
    small_gpu,
    rank,
):
    options = {"engine": "vllm", "steps": 3, "save_every": 1, **small_gpu} | (
        {} if rank else {"policies": {}, "lora_rank": 0}
    )
    model = make_tiny_model(folder / "untied", tie_word_embeddings=False)
    paths = f"{TESTS}:{folder}:{os.environ['PYTHONPATH']}"
    env = {**os.environ, "PYTHONPATH": paths, "SCRIPTED_FAULT": "trainer"}
    died = subprocess.run([sys.executable, "-c", RUN, str(model), json.dumps(options)], env=env, check=False)
    assert died.returncode == -signal.SIGKILL
    for server in {event["pid"] for event in scripted()}:
        wait_until_ended(server)
    before = len(scripted())
    train(config(model, **options, resume=folder / "out"))
    metrics = lines(folder / "out")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert [line["calls_trained"] for line in metrics] == [metrics[0]["calls_trained"]] * 3
    assert all(line["failed"] == 0 for line in metrics)
    gaps = [value for line in metrics for name, value in line.items() if name.startswith("engine_gap/")]
    assert max(gaps) < 1e-3
    loaded = [event["load"].partition(".")[0] for event in scripted()[before:] if "load" in event]
    assert not rank or loaded[2:4] == ["writer@1", "rewriter@1"], "the adapters of the checkpoint"


def wait_until_ended(pid):
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        select.select([handle], [], [])
        os.close(handle)


def test_vllm_does_not_sleep_while_other_rollouts_run(tiny_model, folder, scripted, small_gpu):  # noqa: F811
    with pytest.raises(LightningError, match=r"does not hold both vLLM and the learner: [\d.]+ GiB are missing"):
        train(config(tiny_model, engine="vllm", staleness=1, **small_gpu))


async def test_without_its_key_vllm_does_nothing(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    app = KeyGuard(PlainTextResponse("done"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
        given = [None, {"authorization": "Bearer other"}, {"authorization": "Bearer secret"}]
        replies = [await client.post("/collective_rpc", headers=headers) for headers in given]
        assert [reply.status_code for reply in replies] == [401, 401, 200]
        assert (await client.get("/health")).status_code == 200


def test_an_answer_follows_its_grammar_and_has_the_policys_log_probabilities(tiny_model, folder, scripted):  # noqa: F811
    answers = answer_under_grammar(
        tiny_model, engine_of(config(tiny_model, engine="vllm")), 12, 'start: "ab" /[0-9]{3}/ "z"'
    )
    assert answers.text[:2] == "ab"
    assert answers.text[5:] == "z"
    assert answers.logprobs == pytest.approx(answers.own, abs=1e-4)
    assert answers.steered[:2] == [True, True]
    assert answers.steered[5:] == [True, True], "the z, and the end"


def test_an_adapter_that_is_accepted_and_not_used_ends_the_run_at_its_first_step(
    tiny_model,
    folder,  # noqa: F811
    scripted,
    monkeypatch,
):
    monkeypatch.setenv("SCRIPTED_FAULT", "frozen")
    with pytest.raises(LightningError, match=r"does not sample from the new weights of writer \(agent writer\)"):
        train(config(tiny_model, engine="vllm", steps=3))
    assert not any("writer@1" in event.get("answer", "") for event in scripted())


def test_adapters_that_cannot_be_written_end_the_run(tiny_model, folder, scripted, monkeypatch):  # noqa: F811
    def fill(model, adapter, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_trainer.backends.torch.checkpoint.write_adapter", fill)
    with pytest.raises(
        LightningError, match=r"weights of writer could not be written to .*No space left .* or name another"
    ):
        train(config(tiny_model, engine="vllm"))


def test_a_vllm_that_does_not_start_is_reported_with_its_own_error(tiny_model, folder, scripted, monkeypatch):  # noqa: F811
    monkeypatch.setenv("SCRIPTED_FAULT", "start")
    with pytest.raises(LightningError, match=r"vLLM did not start: ValueError: the model has no config\.json"):
        train(config(tiny_model, engine="vllm"))


def test_vllm_ends_with_a_trainer_that_is_killed(tmp_path):
    fifo = tmp_path / "held"  # the server holds its writing end for as long as it lives
    os.mkfifo(fifo)
    server = f"import time; held = open({str(fifo)!r}, 'w'); time.sleep(600)"
    program = (
        "import os, sys; from pathlib import Path\n"
        "from lightning_trainer.engines.vllm.process import VllmProcess\n"
        f"VllmProcess([sys.executable, '-c', {server!r}], os.environ, Path({str(tmp_path / 'log')!r})).start()"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as trainer, fifo.open() as held:
        trainer.kill()
        assert held.read() == ""


def test_a_vllm_that_is_stopped_with_its_supervisor_is_ended_too(tmp_path, monkeypatch):
    fifo = tmp_path / "held"  # the server holds its writing end for as long as it lives
    os.mkfifo(fifo)
    server = (
        f"import http.server, sys; held = open({str(fifo)!r}, 'w')\n"
        "class Answers(http.server.BaseHTTPRequestHandler):\n"
        "    do_GET = lambda self: (self.send_response(200), self.end_headers())\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Answers).serve_forever()"
    )
    monkeypatch.setattr(process, "_STOP_S", 0.5)
    ours = VllmProcess([sys.executable, "-c", server], os.environ, tmp_path / "log")
    begun = threading.Thread(target=ours.start, daemon=True)
    begun.start()
    with fifo.open() as held:
        begun.join()
        os.killpg(ours._process.pid, signal.SIGSTOP)
        ours.stop()
        assert held.read() == ""


def test_options_that_contradict_each_other_are_refused(tiny_model, folder, tmp_path):  # noqa: F811
    for options, words in (
        ({"engine": "nosuch"}, "unknown engine 'nosuch'. Use one of: embedded, vllm"),
        ({"engine": "vllm", "policies": {}, "lora_rank": 0}, "keeps the old output layer if it is tied"),
        ({"engine_url": "http://127.0.0.1:9/v1", "policies": {}, "lora_rank": 0}, "take LoRA adapters only"),
        ({"engine": "vllm", "lora_rank": 600}, "rank 512 at most"),
        (
            {"engine": "vllm", "staleness": 1, "backend_options": {"lora_targets": ["q_proj", "lm_head"]}},
            "Leave lm_head out of lora_targets, or use engine = embedded",
        ),
        ({"engine": "embedded", "engine_gpus": "1"}, "need engine = vllm"),
        ({"engine": "vllm"}, "vLLM is not installed here"),
        ({"engine_python": str(tmp_path / "none")}, "does not run"),
        ({"engine": "vllm", "engine_url": "http://elsewhere:8000/v1"}, "Name it: engine_options = {folder"),
        ({"engine_url": "http://127.0.0.1:9/v1", "engine_gpus": "1"}, "engine_python and engine_gpus have no effect"),
        ({"engine": "vllm", "engine_options": {"max-loras": 1}}, "the run sets max_loras itself"),
        ({"engine": "vllm", "engine_options": {"folder": "none"}}, "folder = 'none' is not a folder"),
    ):
        with pytest.raises(ConfigError, match=words.replace("{", r"\{")):
            train(config(tiny_model, **options))


def test_vllm_is_the_default_for_adapters_on_cuda_alone(tiny_model, monkeypatch):
    monkeypatch.setattr("lightning_trainer.backends.torch.sampler.is_installed", lambda: True)
    cuda = "lightning_trainer.backends.torch.sampler.has_cuda"
    monkeypatch.setattr(cuda, lambda device: True)
    assert engine_name(config(tiny_model)) == "vllm"
    assert engine_name(config(tiny_model, policies={}, lora_rank=0)) == "embedded"
    assert engine_name(config(tiny_model, device="cpu")) == "embedded"
    assert engine_name(config(tiny_model, engine="embedded")) == "embedded"
    monkeypatch.setattr(cuda, lambda device: False)
    assert engine_name(config(tiny_model)) == "embedded"


def test_the_last_error_is_the_one_that_says_why(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO 11-26 10:00:00 [api.py:1] starting\n"
        "(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9] ModuleNotFoundError: No module named 'flashinfer'\n"
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    vague = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("(APIServer pid=6) ERROR 11-26 10:00:02 [serving.py:495] Error in completion stream generator.\n")
        file.write(vague * 2000)  # one for each request that was in progress
    assert last_error(log) == "ModuleNotFoundError: No module named 'flashinfer'"
    assert last_error(log, since) == vague.strip(), "not the error of an earlier server"
    log.write_text("Killed\n")
    assert last_error(log) == "Killed"
    assert last_error(tmp_path / "none") == "it said nothing"


def test_a_missing_flashinfer_is_told_to_vllm():
    without = process.Environment(vllm=True, flashinfer=False, version="0.24.0")
    found = environment_of({}, without, gpus="1", cpu_cache=2)
    assert (found["VLLM_USE_FLASHINFER_SAMPLER"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    with_it = process.Environment(vllm=True, flashinfer=True, version="0.24.0")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment_of({}, with_it, gpus=None, cpu_cache=2)
    given = {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
    assert environment_of(given, without, gpus=None, cpu_cache=2)["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


@pytest.mark.parametrize(
    ("device", "gpus", "visible", "given"),
    [
        ("cuda:1", None, None, "1"),  # the learner's GPU
        ("cuda:1", None, "2,3", "3"),
        ("cuda", None, "2,3", "2,3"),
        ("cuda", "1", "2,3", "3"),
        ("cuda", "1,2", None, "1,2"),
        ("cuda", "GPU-8f1a", "2,3", "GPU-8f1a"),
    ],
)
def test_gpus_are_numbered_among_those_that_this_process_sees(tiny_model, device, gpus, visible, given):
    request = EngineRequest(model=tiny_model, device=device, gpus=gpus)
    found = process.Environment(vllm=True, flashinfer=True, version="0.24.0")
    around = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = environment_of(around, found, gpus=request.chosen_gpus, cpu_cache=2)
    assert env["CUDA_VISIBLE_DEVICES"] == given


@pytest.mark.parametrize(
    ("visible", "sizes"), [(None, [1, 2, 3]), ("2,0", [3, 1]), ("GPU-8f1a", [1, 2, 3]), ("7", [1, 2, 3])]
)
def test_memory_is_that_of_the_gpus_that_this_process_sees(monkeypatch, visible, sizes):
    asked = subprocess.CompletedProcess([], 0, "1\n2\n3\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: asked)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_totals() == [size * 2**20 for size in sizes]


def test_a_gpu_that_this_process_does_not_see_is_refused():
    found = process.Environment(vllm=True, flashinfer=True, version="0.24.0")
    with pytest.raises(ConfigError, match=r"shows 2 GPUs to this process. Number them from 0 to 1"):
        environment_of({"CUDA_VISIBLE_DEVICES": "2,3"}, found, gpus="2", cpu_cache=2)


def test_options_of_vllm_are_written_as_it_reads_them(tiny_model):
    request = EngineRequest(model=tiny_model, device="cpu", options={"enable-prefix-caching": False, "folder": "/f"})
    found = _given_options(request) | {"speculative_config": {"method": "ngram"}, "enforce_eager": False}
    assert command_of(None, tiny_model, found)[5:] == [
        "--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}'
    ]  # fmt: skip


def test_a_folder_in_memory_is_removed_only_once_its_process_has_ended(tmp_path, monkeypatch):
    """Whatever its number: containers that share the memory have processes of their own."""
    monkeypatch.setattr(folders, "Path", lambda *parts: tmp_path if parts == ("/dev/shm",) else Path(*parts))
    made = folders.make_folder()
    left, begun = tmp_path / "lightning-engine-1-left", tmp_path / "lightning-engine-999999999-begun"
    left.mkdir()
    (left / "in_use").touch()
    begun.mkdir()
    assert folders.ram_folder() == tmp_path
    assert sorted(tmp_path.iterdir()) == sorted([made, begun])
    assert folders.ram_folder(need=2**60) == Path(tempfile.gettempdir())


ENDS_IF_ASKED = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/end":
            print("OSError: the disk is full", flush=True)
            import os; os._exit(1)
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answers).serve_forever()
"""


def end(url):
    with contextlib.suppress(httpx.TransportError):
        httpx.get(f"{url}/../end")


def end_again_and_again(ours):
    while url := ours.wait():
        end(url)


def test_a_server_that_keeps_ending_is_given_up_with_its_last_error(tmp_path):
    ours = VllmProcess([sys.executable, "-c", ENDS_IF_ASKED], os.environ, tmp_path / "log")
    ours.start()
    try:
        with pytest.raises(LightningError, match="vLLM ended 4 times in a row: OSError: the disk is full"):
            end_again_and_again(ours)
    finally:
        ours.stop()


def test_an_update_in_which_vllm_sleeps_waits_until_one_that_ended_is_back(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(kind, "command_of", lambda *_: [sys.executable, "-c", ENDS_IF_ASKED])
    request = EngineRequest(model=tmp_path, device="cpu", policies=("writer",), lora_rank=4)
    held = HeldModel(name="base", tokenizer=None, max_model_len=64)
    server = OwnServer(request, held, process.Environment(vllm=True, flashinfer=False, version=None))
    server.sleeps = True
    policies = VllmPolicies(request, held, server, tmp_path / "adapters")
    try:
        server.start(policies)
        (before,) = server.urls
        end(before)
        while server.process.up and server.urls == (before,):  # it may be back before it is seen to be down
            time.sleep(0.01)
        with policies.rest():
            assert server.process.up
            assert server.urls != (before,)
    finally:
        policies.close()
