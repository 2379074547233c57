"""From the user's options to verl's, without verl."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import backend as torch_backend
from lightning_trainer.backends.verl.options.algorithms import ALGORITHMS
from lightning_trainer.backends.verl.options.grammar import as_hydra
from lightning_trainer.backends.verl.options.needs import GIB, checkpoint_bytes, estimate, tensor_parallel
from lightning_trainer.backends.verl.options.overrides import HERE, Site, overrides
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models.shape import read_shape, shape_of
from lightning_trainer.registry import registrations

QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
SITE = Site(folder=Path("/shared/run"), steps=20)


def config(**options: object) -> TrainConfig:
    given = {"target": "app:run", "data": "tasks.jsonl", "model": "org/model", "backend": "verl", "gpus": 8}
    return TrainConfig(**{**given, **options})


def told(**options: object) -> dict[str, object]:
    return overrides(config(**options), SITE, shape_of(QWEN_7B), flash_attention=True)


def test_each_option_of_the_user_reaches_the_option_of_verl_that_means_it():
    values = told(learning_rate=3e-6, batch_size=16, group_size=4, clip_low=0.1, clip_high=0.3, max_grad_norm=0.5)
    assert values["actor_rollout_ref.actor.optim.lr"] == 3e-6
    assert values["data.train_batch_size"] == values["actor_rollout_ref.actor.ppo_mini_batch_size"] == 16
    assert values["actor_rollout_ref.rollout.n"] == 4
    assert values["actor_rollout_ref.actor.clip_ratio_low"] == 0.1
    assert values["actor_rollout_ref.actor.clip_ratio_high"] == 0.3
    assert values["actor_rollout_ref.actor.optim.clip_grad"] == 0.5
    assert (values["trainer.n_gpus_per_node"], values["trainer.nnodes"]) == (8, 1)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 1024}])
def test_an_answer_may_fill_the_context_because_the_gateway_applies_its_limit(limit):
    values = told(max_model_len=8192, **limit)
    assert values["data.max_response_length"] == 8191, "verl has vLLM cut off every answer there"
    assert values["data.max_prompt_length"] + values["data.max_response_length"] == 8192
    assert values["actor_rollout_ref.rollout.max_model_len"] == 8192


def test_without_a_length_the_models_own_context_holds():
    assert told()["actor_rollout_ref.rollout.max_model_len"] == 32768


@pytest.mark.parametrize("stretching", ["rope_scaling", "rope_parameters"])
def test_more_than_the_models_context_is_refused_unless_its_positions_are_stretched(stretching):
    with pytest.raises(ConfigError, match="max_model_len 40000 is more than the 32768 tokens of org/model"):
        told(max_model_len=40000)
    longer = shape_of({**QWEN_7B, stretching: {"rope_type": "yarn", "factor": 4.0}})
    values = overrides(config(max_model_len=40000), SITE, longer, flash_attention=True)
    assert values["actor_rollout_ref.rollout.max_model_len"] == 40000


def test_longrope_models_have_the_length_of_their_short_positions_and_no_more():
    positions = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}
    shape = shape_of({**QWEN_7B, **positions})
    values = overrides(config(), SITE, shape, flash_attention=True)
    assert values["actor_rollout_ref.rollout.max_model_len"] == 4096
    with pytest.raises(ConfigError, match=r"longrope.* Set max_model_len to at most 4096"):
        overrides(config(max_model_len=8192), SITE, shape, flash_attention=True)


@pytest.mark.parametrize(
    ("algorithm", "estimator", "critic"),
    [
        ("grpo", "lightning", False),
        ("dr-grpo", "lightning_sequence_sum", False),
        ("gspo", "lightning_sequence_mean", False),
        ("cispo", "lightning", False),
        ("reinforce++-baseline", "lightning_whitened", False),
        ("rloo", "lightning", False),
        ("reinforce++", "lightning_whitened", False),
        ("ppo", "gae", True),
    ],
)
def test_each_algorithm_has_its_estimator(algorithm, estimator, critic):
    values = told(algorithm=algorithm)
    assert values["algorithm.adv_estimator"] == estimator
    assert values["critic.enable"] is critic


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"algorithm": "gspo"}, {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}),
        ({"algorithm": "cispo"}, {"actor_rollout_ref.actor.clip_ratio_low": 1.0}),
        ({}, {"actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla"}),
        ({"entropy_coef": 0.01}, {"actor_rollout_ref.actor.entropy_coeff": 0.01}),
        ({"kl_coef": 0.1}, {"actor_rollout_ref.actor.kl_loss_type": "k3"}),
        ({"kl_coef": 0.1, "kl_estimator": "low_var+"}, {"actor_rollout_ref.actor.kl_loss_type": "low_var_kl+"}),
        (
            {"algorithm": "ppo", "kl_coef": 0.1, "gae_lambda": 0.9, "value_clip": 0.2, "value_learning_rate": 1e-4},
            {
                "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k1", "algorithm.kl_ctrl.kl_coef": 0.1,
                "actor_rollout_ref.actor.use_kl_loss": False, "algorithm.lam": 0.9,
                "critic.cliprange_value": 0.2, "critic.optim.lr": 1e-4,
            },
        ),
    ],
)  # fmt: skip
def test_losses_and_their_terms_reach_verl(options, expected):
    values = told(**options)
    assert {key: values[key] for key in expected} == expected


def test_adapters_are_sent_as_adapters_unless_merging_is_asked_for():
    merge, load, middleware = (
        "actor_rollout_ref.model.lora.merge",
        "actor_rollout_ref.rollout.load_format",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.middleware",
    )
    values = told(lora_rank=16)
    assert values["actor_rollout_ref.model.lora_rank"] == 16
    assert values["actor_rollout_ref.model.lora_alpha"] == 32
    assert (values[merge], values[load]) == (False, "auto")
    assert middleware in values
    merged = told(lora_rank=16, verl={"actor_rollout_ref": {"model": {"lora": {"merge": True}}}})
    assert (merged[merge], merged[load]) == (True, "dummy")
    assert middleware not in merged
    assert told()[load] == "dummy"
    assert merge not in told()


def test_staleness_turns_to_asynchronous_collection_with_importance_correction():
    values = told(staleness=2)
    assert values["trainer.v1.trainer_mode"] == "lightning_async"
    assert values["trainer.v1.sampler.max_off_policy_threshold"] == 3
    assert values["trainer.v1.sampler.max_off_policy_strategy"] == "wait"
    assert values["algorithm.rollout_correction.rollout_is"] == "token"
    assert told()["trainer.v1.trainer_mode"] == "lightning_sync"
    assert "algorithm.rollout_correction.rollout_is" not in told()


@pytest.mark.parametrize(
    ("kind", "table", "wanted"),
    [
        ("qwen2", {}, (True, "packed_rows")),
        ("qwen2", {"actor_rollout_ref.model.use_remove_padding": False}, (False, "sdpa")),
        ("gemma2", {}, (False, "sdpa")),
        (None, {}, (False, "sdpa")),
    ],
)
def test_without_flash_attention_rows_are_packed_where_attention_is_plain(tmp_path, kind, table, wanted):
    if kind is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    values = overrides(config(model=str(tmp_path), verl=table), SITE, None, flash_attention=False)
    model = "actor_rollout_ref.model"
    found = values[f"{model}.use_remove_padding"], values[f"+{model}.override_config.attn_implementation"]
    assert found == wanted


def test_rows_are_not_shared_by_gpus_without_flash_attention():
    table = {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size needs flash attention"):
        overrides(config(verl=table), SITE, None, flash_attention=False)


@pytest.mark.parametrize("nested", [True, False])
def test_any_other_option_of_verl_is_passed_on(nested):
    table = {"actor_rollout_ref": {"rollout": {"gpu_memory_utilization": 0.7}}}
    if not nested:
        table = {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.7}
    assert told(verl=table)["actor_rollout_ref.rollout.gpu_memory_utilization"] == 0.7


def test_an_option_that_was_added_is_replaced_where_it_stands():
    cpu = told(device="cpu", gpus=1, verl={"ray_kwargs.ray_init.num_gpus": 4})
    assert cpu["+ray_kwargs.ray_init.num_gpus"] == 4
    assert "ray_kwargs.ray_init.num_gpus" not in cpu


@pytest.mark.parametrize("gpus", [1, 8])
def test_an_own_ray_has_the_cores_that_verl_asks_for_however_few_the_machine_has(gpus):
    units = 8  # TransferQueue's, by verl's default, each with a core; a controller, and who starts last
    assert told(gpus=gpus)["ray_kwargs.ray_init.num_cpus"] >= units + 2 + 3 * gpus


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_another_ray_is_not_told_what_it_has(device, plus):
    values = told(device=device, gpus=1, verl={f"{plus}ray_kwargs.ray_init.address": "auto"})
    assert values["+ray_kwargs.ray_init.address"] == "auto"
    assert not {name.lstrip("+") for name in values} & {f"ray_kwargs.ray_init.num_{kind}pus" for kind in "cg"}


@pytest.mark.parametrize(
    ("dtype", "sampled", "learned"), [("auto", "float32", "fp32"), ("bfloat16", "bfloat16", "bf16")]
)
def test_on_a_cpu_learning_computes_with_what_samples(dtype, sampled, learned):
    cpu = told(device="cpu", gpus=1, dtype=dtype)
    assert cpu["actor_rollout_ref.rollout.dtype"] == sampled
    assert cpu["+actor_rollout_ref.actor.fsdp_config.mixed_precision"]["param_dtype"] == learned


def test_micro_batches_are_small_on_a_cpu_and_do_not_grow_with_the_context():
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert told(device="cpu", gpus=1, max_model_len=4096)[tokens] == 1024
    assert told(max_model_len=1024)[tokens] == told(max_model_len=32768)[tokens] == 16384


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("actor_rollout_ref.actor.optim.lr", "follows from learning_rate"),
        ("++trainer.nnodes", "follows from nodes"),
        ("trainer.v1.trainer_mode", "connects verl with this trainer"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class", "connects verl with this trainer"),
    ],
)
def test_an_option_that_is_ours_is_refused_in_the_table(key, says):
    with pytest.raises(ConfigError, match=says):
        told(verl={key: 1})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agents": "a,b", "agent_weight": "equal"}, "agent_weight is for backend = torch or tinker"),
        ({"kl_coef": 0.1, "loss_aggregation": "sequence-mean"}, "token-mean"),
        ({"algorithm": "ppo", "loss_aggregation": "sequence-mean"}, "token-mean"),
        ({"loss_aggregation": "rollout-mean"}, "has no loss_aggregation = rollout-mean"),
        ({"algorithm": "dapo"}, "Set resample = 0"),
        ({"algorithm": "reinforce++", "kl_coef": 0.1}, "only with a critic"),
        ({"entropy_coef": 0.1, "loss_aggregation": "sequence-mean"}, "entropy over tokens"),
        ({"device": "cuda:1"}, "number of gpus"),
        ({"until": 0.9}, "Leave until out"),
        ({"policies": "writer=lora,judge=lora"}, "train an adapter for each agent with --backend torch --engine vllm"),
        ({"engine": "vllm"}, "verl always samples with vLLM"),
        ({"batch_size": 1, "group_size": 2}, "fewer than the accelerators"),
        ({"lora_rank": 4, "lora_alpha": 2.5}, "whole numbers"),
        ({"policies": "writer=lora"}, "verl trains one policy"),
    ],
)
def test_what_verl_can_not_do_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        told(**options)


def test_an_algorithm_that_verl_does_not_know_is_refused():
    strange = config().model_copy(update={"algorithm": "likelihood"})
    with pytest.raises(ConfigError, match=r"verl knows no algorithm .likelihood.\. Use one of: grpo, dr-grpo"):
        overrides(strange, SITE, shape_of(QWEN_7B), flash_attention=True)


def test_verl_knows_every_algorithm_that_the_trainer_brings():
    torch_only = {"likelihood", "distil", "rae"}  # refused on verl: data to learn from, a teacher
    assert ALGORITHMS.keys() == registrations("algorithm").keys() - torch_only
    for name, on_verl in ALGORITHMS.items():
        assert on_verl.critic == registrations("algorithm")[name].critic


def test_one_node_has_a_ray_of_its_own_and_several_join_the_cluster():
    """A Ray that someone else started on this machine is left alone."""
    address = "+ray_kwargs.ray_init.address"
    assert told()[address] == "local"
    assert told(nodes=2, batch_size=16)[address] == "auto"


@pytest.mark.parametrize("option", [{"gpus": 2}, {"nodes": 2}, {"verl": {"a": 1}}])
def test_options_of_verl_are_refused_with_the_torch_backend(option):
    with pytest.raises(ConfigError, match='backend = "verl"'):
        torch_backend.check(TrainConfig(target="app:run", data="tasks.jsonl", model="m", **option))


def test_verl_finds_our_classes_and_modules_where_it_is_told_to():
    """verl imports them by these names, in its own processes, when a run has long begun."""
    named = [value for value in told().values() if isinstance(value, str) and HERE in value]
    assert len(named) == 6
    for name in named:
        module = name.removeprefix("pkg://")
        if not name.startswith("pkg://") and module.rpartition(".")[2][0].isupper():
            module, _, thing = module.rpartition(".")
            source = ast.parse(Path(find_spec(module).origin).read_text())
            assert thing in {node.name for node in source.body if isinstance(node, ast.ClassDef)}
        assert find_spec(module) is not None, name


def test_values_are_written_in_hydras_grammar():
    values = {"a": None, "b": True, "c": 1e-6, "d": 'x "y" \\ z\\', "e": ["p", 1], "f": {"g": "h"}}
    assert as_hydra(values) == [
        "a=null",
        "b=true",
        "c=1e-06",
        'd="x \\"y\\" \\ z\\\\"',
        'e=["p",1]',
        'f={g:"h"}',
    ]


def test_the_weights_of_a_model_are_counted(tmp_path):
    shape = shape_of(QWEN_7B)
    assert shape is not None
    assert shape.parameters == pytest.approx(7.6156e9, rel=1e-3)  # what its card says
    assert read_shape("org/on-the-hub") is None
    assert shape_of({**QWEN_7B, "num_experts": 64}) is None
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(str(tmp_path))


def test_a_malformed_config_of_a_model_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN_7B}))
    assert read_shape(str(tmp_path)) == shape_of(QWEN_7B)


def test_memory_is_shared_out_over_accelerators():
    shape = shape_of(QWEN_7B)
    assert shape is not None
    options = {"tensor_parallel": 1, "tokens": 8192, "lora": False, "reference": False, "critic": False}
    one, eight = (estimate(shape, accelerators=n, **options) for n in (1, 8))
    assert one.training == pytest.approx(8 * eight.training) == pytest.approx(shape.parameters * 16 / GIB)
    assert eight.kv_token == 2 * 2 * 4 * 128 * 28  # keys and values, two bytes, kv width, layers
    assert eight.while_sampling(80, 0.5) > 100_000
    assert eight.while_sampling(10, 0.5) == 0.0


def test_weights_too_large_for_one_accelerator_are_split():
    large = shape_of({**QWEN_7B, "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672})
    assert tensor_parallel(shape_of(QWEN_7B), 8) == 1
    assert tensor_parallel(large, 8) == 8
    assert tensor_parallel(large, 6) == 2  # a divisor of the node's accelerators
    assert tensor_parallel(None, 8) == 1


def test_importance_and_learning_rate_reach_verl_under_the_names_of_torch():
    values = told(importance_cap=3.0, importance_mask=2.0, warmup_steps=5, lr_schedule="cosine", min_lr_ratio=0.1)
    correction = {key.rpartition(".")[2]: value for key, value in values.items() if "rollout_correction" in key}
    assert correction == {
        "rollout_is": "token",
        "rollout_is_threshold": 3.0,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.5_2.0",
    }
    optim = "actor_rollout_ref.actor.optim"
    assert values[f"{optim}.lr_warmup_steps"] == 5
    assert (values[f"{optim}.lr_scheduler_type"], values[f"{optim}.min_lr_ratio"]) == ("cosine", 0.1)
    assert told(staleness=1, importance_cap=3.0)["algorithm.rollout_correction.rollout_is_threshold"] == 3.0
    with pytest.raises(ConfigError, match="follows from importance_cap"):
        told(importance_cap=3.0, verl={"algorithm.rollout_correction.rollout_is": "sequence"})


def test_a_checkpoint_of_adapters_has_no_moments_of_the_frozen_weights() -> None:
    shape = shape_of(QWEN_7B)
    assert shape is not None
    whole = checkpoint_bytes(shape, adapters=0, critic=False)
    assert whole == 16 * shape.parameters
    assert checkpoint_bytes(shape, adapters=40_370_176, critic=False) == 8 * shape.parameters + 12 * 40_370_176
    assert checkpoint_bytes(shape, adapters=0, critic=True) == whole + 12 * shape.parameters
