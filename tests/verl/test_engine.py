"""verl's training engine on our rows: against transformers, and against the torch backend."""

from __future__ import annotations

import os
import shutil
import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("verl.protocol")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.verl.encoding import encode, prompt_length, spans_of
from lightning_trainer.backends.verl.estimators import estimate
from lightning_trainer.backends.verl.options.describe import compose_options
from lightning_trainer.backends.verl.options.overrides import Site, overrides
from lightning_trainer.backends.verl.run_tokenizer import open_tokenizer
from lightning_trainer.backends.verl.steps.merged import merge_adapters
from lightning_trainer.backends.verl.steps.micro_batches import micro_batch_options
from lightning_trainer.backends.verl.steps.trajectories import VerlPrompt, trajectories
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.lineage.manifest import StepSources
from lightning_trainer.models.shape import read_shape
from lightning_trainer.rl.advantages import transition_advantages
from lightning_trainer.rl.rows import Row

pytestmark = pytest.mark.timeout(300)
LEARNING_RATE = 1e-3


@pytest.fixture(scope="module")
def rows(model) -> list[Row]:
    """Rows of two groups of three rollouts; some have two calls with other tokens between them."""
    rng = np.random.default_rng(7)
    returns, groups = rng.random(6), [0, 0, 0, 1, 1, 1]
    advantages = transition_advantages(returns, range(6), groups)
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = []
    for number in range(6):
        shape = [(int(rng.integers(3, 9)), int(rng.integers(2, 7))) for _ in range(1 + number % 2)]
        mask = np.concatenate([[False] * before + [True] * sampled for before, sampled in shape])
        tokens = rng.integers(3, 250, len(mask)).astype(np.int32)
        logprobs = np.where(mask, logprobs_of(causal, tokens) + 0.2 * rng.standard_normal(len(mask)), 0)
        made.append(
            Row(
                tokens=tokens,
                mask=mask,
                logprobs=logprobs.astype(np.float32),
                advantages=np.where(mask, advantages[number], 0.0),
                lengths=tuple(sampled for _, sampled in shape),
                agent="a",
                attempt_id=str(number),
                rollout_id=str(number),
                group_id=str(groups[number]),
            )
        )
    return made


def logprobs_of(causal, tokens: np.ndarray) -> np.ndarray:
    """(T,) log-probability of each token after those before it; 0 for the first."""
    with torch.no_grad():
        logits = causal(torch.tensor(tokens[None], dtype=torch.long)).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:, None], dtype=torch.long))[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


def worker_of(model, aggregation: str = "token-mean", learning_rate: float = LEARNING_RATE, **more):
    """verl's actor, in this process, with the options that a run would have."""
    from hydra.core.global_hydra import GlobalHydra

    from lightning_trainer.backends.verl.workers import ActorWorker

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = TrainConfig(
        target="a:b",
        data="tasks.jsonl",
        model=str(model),
        backend="verl",
        device="cpu",
        learning_rate=learning_rate,
        loss_aggregation=aggregation,
        batch_size=2,
        group_size=3,
        **more,
    )
    GlobalHydra.instance().clear()
    options = overrides(config, Site(folder=model.parent), read_shape(str(model)), flash_attention=False)
    worker = ActorWorker(config=compose_options(options).actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def batch_of(rows: list[Row], aggregation: str):
    """The batch as verl's trainer would send it; recorded log-probabilities are the old ones."""
    from verl.utils import tensordict_utils as tu

    laid = trajectories(VerlPrompt(uid="u", step=1), [[row] for row in rows], [0.0] * len(rows), StepSources())
    fields = [dict(trajectory.fields) for trajectory in laid]
    longest = max(len(field["responses"]) for field in fields)
    padded = [
        torch.nn.functional.pad(field["response_mask"], (0, longest - len(field["responses"]))) for field in fields
    ]
    uids = [encode(spans_of(row)) for row in rows]
    advantages, _ = estimate(response_mask=torch.stack(padded), index=uids, whiten=False, aggregation=aggregation)
    for field, advantage in zip(fields, advantages, strict=True):
        field["advantages"] = advantage[: len(field["responses"])]
        field["old_log_probs"] = field["rollout_log_probs"]
    names = ["prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "advantages"]
    batch = tu.list_of_dict_to_tensordict([{name: f[name] for name in [*names, "old_log_probs"]} for f in fields])
    tu.assign_non_tensor(
        batch,
        temperature=1.0,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=len(rows),
        mini_batch_size=len(rows),
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
        **micro_batch_options([len(row.tokens) for row in rows], 1, 60, packed=False),
    )
    assert 1 < batch["micro_batch_size_per_gpu"] < len(rows), "several micro-batches of several rows"
    return batch


@pytest.mark.parametrize("packed", [True, False])
def test_verls_engine_gives_the_log_probabilities_of_transformers(model, rows, packed):
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    worker = worker_of(model, "token-mean", verl={"actor_rollout_ref.model.use_remove_padding": packed})
    batch = batch_of(rows, "token-mean")
    tu.assign_non_tensor(batch, calculate_entropy=True, compute_loss=False)
    out = worker.compute_log_prob(batch)
    found = response_from_nested(tu.get(out, "log_probs"), batch["response_mask"])
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row, values in zip(rows, found.unbind(), strict=True):
        first = prompt_length(row)
        np.testing.assert_allclose(values.numpy(), logprobs_of(causal, row.tokens)[first:], atol=2e-5)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_one_update_is_that_of_the_torch_backend(model, rows, aggregation, tmp_path):
    from verl.utils import tensordict_utils as tu

    worker = worker_of(model, aggregation)
    metrics = tu.get(worker.update_actor(batch_of(rows, aggregation)), "metrics")
    theirs, _ = worker.actor.engine.get_per_tensor_param()
    theirs = {name: value.detach().clone() for name, value in theirs}

    backend = TorchLearner(
        model, dtype="float32", device="cpu", learning_rate=LEARNING_RATE, loss_aggregation=aggregation, threads=1
    )
    try:
        ours = backend.update(rows)
        backend.save(tmp_path)
    finally:
        backend.close()
    after = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert ours["grad_norm"] == pytest.approx(float(np.mean(metrics["grad_norm"])), rel=1e-3)
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    apart = max(float((after[name] - theirs[name]).abs().max()) for name in before)
    assert moved > 0.5 * LEARNING_RATE
    assert apart < 0.05 * moved


def test_a_loras_checkpoint_is_the_model_that_vllm_got(model, tmp_path):
    merged = {"actor_rollout_ref": {"model": {"lora": {"merge": True}}}}
    worker = worker_of(model, lora_rank=4, verl=merged)
    engine = worker.actor.engine
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    sent = {name: value.float() for name, value in engine.get_per_tensor_param()[0]}
    worker.save_checkpoint(str(tmp_path / "actor"), None, 1, 2)
    merge_adapters(tmp_path / "actor" / "huggingface")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface", dtype=torch.float32).state_dict()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert max(float((saved[name] - base[name]).abs().max()) for name in sent) > 0.05
    for name, value in sent.items():
        torch.testing.assert_close(saved[name], value, atol=1e-2, rtol=1e-2)  # it was sent in bfloat16
    with torch.no_grad():
        engine.module.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight").zero_()
    worker.load_checkpoint(str(tmp_path / "actor"))
    again = {name: value.float() for name, value in engine.get_per_tensor_param()[0]}
    assert all(torch.equal(again[name], value) for name, value in sent.items()), "and the run goes on from it"


def test_a_checkpoint_has_the_chat_template_of_its_run(model, tmp_path):
    from lightning_trainer.backends.verl.steps.checkpoints import RegisterCheckpoint

    config = TrainConfig(target="app:run", data="d.jsonl", model=str(model), backend="verl", system_messages="merge")
    template = open_tokenizer(config, tmp_path).chat_template
    written = tmp_path / "checkpoints" / "global_step_1"
    shutil.copytree(model, written / "actor" / "huggingface")
    trainer = SimpleNamespace(default_local_dir=str(written.parent))
    RegisterCheckpoint(SimpleNamespace(trainer=trainer)).on_save(global_step=1, checkpoint_dir=str(written))
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").chat_template == template
    assert AutoTokenizer.from_pretrained(model).chat_template != template


@pytest.fixture(scope="module")
def resumed(model, tmp_path_factory):
    """The actor of a run that resumes after its tenth step, and the folder of the run's checkpoints."""
    folder, before = tmp_path_factory.mktemp("checkpoints"), worker_of(model, warmup_steps=4)
    before.actor.engine.optimizer_step()
    before.actor.engine.lr_scheduler_step()
    for step in (9, 10):
        before.save_checkpoint(str(folder / f"global_step_{step}" / "actor"), None, step, 2)
    worker = worker_of(model, warmup_steps=4, learning_rate=LEARNING_RATE / 10)
    worker.load_checkpoint(str(folder / "global_step_10" / "actor"))
    return worker, folder


def test_a_resumed_run_learns_at_its_own_rate_from_where_the_schedule_was(resumed):
    engine = resumed[0].actor.engine
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([LEARNING_RATE / 10 * 1 / 4])
    assert engine.lr_scheduler_step() == pytest.approx(LEARNING_RATE / 10 * 2 / 4)


def test_a_resumed_run_counts_the_checkpoints_from_before_when_it_removes_old_ones(resumed):
    worker, folder = resumed
    worker.save_checkpoint(str(folder / "global_step_11" / "actor"), None, 11, 2)
    assert sorted(path.parent.name for path in folder.glob("*/actor")) == ["global_step_10", "global_step_11"]


def test_actor_and_critic_are_workers_that_resume_so(monkeypatch):
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import PPOTrainer

    from lightning_trainer.backends.verl.steps import trainers
    from lightning_trainer.backends.verl.workers import LearnerWorker

    def of_verl(trainer) -> None:
        trainer.role_worker_mapping = dict.fromkeys([Role.ActorRolloutRef, Role.Critic])

    monkeypatch.setattr(PPOTrainer, "_init_resource_pool_mgr", of_verl)
    monkeypatch.setattr(trainers.ray, "remote", lambda worker: worker)
    trainer = object.__new__(trainers.SyncTrainer)
    trainer._init_resource_pool_mgr()
    assert trainer.role_worker_mapping[Role.ActorRolloutRef].actor_worker_cls is LearnerWorker
    assert issubclass(trainer.role_worker_mapping[Role.Critic], LearnerWorker)


def test_a_trainer_tells_its_workers_how_many_rows_they_take_at_once(monkeypatch):
    from omegaconf import OmegaConf
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import PPOTrainer

    from lightning_trainer.backends.verl.steps.trainers import SyncTrainer

    trainer = object.__new__(SyncTrainer)
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100}
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "model": {"use_remove_padding": False}}})
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    lengths = [40, 10, 30, 20, 5, 50, 7, 8]
    batch = KVBatchMeta(partition_id="train", keys=[*"abcdefgh"], tags=[{"seq_len": length} for length in lengths])
    trainer._bound_micro_batches(batch)
    assert "".join(batch.keys) == "bdcaeghf"
    assert trainer._at_once == {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    for name in ("_compute_ref_log_prob", "_compute_values", "_update_critic", "_update_actor"):
        monkeypatch.setattr(PPOTrainer, name, lambda _, batch, metrics: batch)
        written = KVBatchMeta(partition_id="train", keys=["a"], tags=[{}])  # as verl makes it anew when it has written
        assert getattr(trainer, name)(written, {}).extra_info == trainer._at_once, name
    trainer.config.actor_rollout_ref.model.use_remove_padding = True
    trainer._bound_micro_batches(batch)
    assert trainer._at_once == {}, "verl's own packing holds every row"


def test_what_verl_says_of_the_reference_is_not_said_to_the_critic(monkeypatch):
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import PPOTrainer

    from lightning_trainer.backends.verl.steps.trainers import SyncTrainer

    def without_adapter(_, batch, metrics):
        batch.extra_info["no_lora_adapter"] = True
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_ref_log_prob", without_adapter)
    trainer = object.__new__(SyncTrainer)
    trainer._at_once = {}
    batch = trainer._compute_ref_log_prob(KVBatchMeta(partition_id="train", keys=["a"], tags=[{}]), {})
    assert "no_lora_adapter" not in batch.extra_info
