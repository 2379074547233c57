"""From what the user means to verl's options: one function, without importing verl.

Three kinds of keys. Those that follow from an option of `TrainConfig` can only be changed there. Those that connect
verl with this trainer can't be changed. All others are defaults, and the table `verl` of the configuration goes before
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.verl.profiles import Values, defaults, model_path, on_cpu
from lightning_trainer.backends.verl.shape import Shape
from lightning_trainer.config import TrainConfig
from lightning_trainer.recipes import RECIPES, Aggregation, LossName, recipe_of

HERE: Final = "lightning_trainer.backends.verl"
# Our name of a policy loss, and verl's.
LOSSES: Final[Mapping[LossName, str]] = {"clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}
# What ends the estimator's name, by how the loss weighs responses.
AGGREGATIONS: Final[Mapping[Aggregation, str]] = {
    "token-mean": "",
    "sequence-mean": "_sequence_mean",
    "sequence-sum": "_sequence_sum",
}
CONFIG_NAME: Final = "config.json"  # in the run's folder: the configuration, for the trainer's process
DEFAULT_CONTEXT: Final = 4096  # where neither the configuration nor the model says how long a conversation gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the run is, which verl's processes must know.

    Attributes:
        folder: the run's folder, on storage that all nodes share.
        url: of the run's own server.
        key_file: file with its admin key.
        steps: optimiser steps of the whole run.
        resume: verl's checkpoint folder to go on from; None: from the start.
    """

    folder: Path
    url: str = "http://127.0.0.1:0"
    key_file: Path = Path("admin.key")
    steps: int = 1
    resume: Path | None = None


def overrides(config: TrainConfig, place: Place, shape: Shape | None, *, flash_attention: bool) -> Values:
    """Give verl's options, by dotted key, over its `ppo_trainer` configuration.

    Args:
        config: of the run.
        place: where it is.
        shape: of the model; None where it can't be read.
        flash_attention: whether the package flash_attn is installed, without which rows can't be packed.

    Raises:
        ConfigError: an option is not for verl, or the table `verl` sets a key that is not its own.
    """
    check(config)
    if recipe_of(config.algorithm).critic and config.device != "cpu" and not flash_attention:
        raise ConfigError("verl's critic needs flash attention. Install flash-attn, or use another algorithm.")
    context = config.max_model_len or (shape.context if shape else DEFAULT_CONTEXT)
    if shape and context > shape.context and not shape.stretched:
        raise ConfigError(f"max_model_len {context} is more than the {shape.context} tokens of {config.model}.")
    derived = _derived(config, place, context)
    connecting = _connecting(config, place)
    values = defaults(config, shape, context, flash_attention=flash_attention)
    if config.device == "cpu":
        values |= on_cpu(config, context)
    passed = dict(flatten(config.verl))
    _refuse(passed, derived, connecting)
    known = {key.lstrip("+"): key for key in values}
    for key, value in passed.items():
        bare = key.lstrip("+")
        values[known.get(bare, key)] = value
    return {**{key: value for key, (value, _) in derived.items()}, **values, **connecting}


def check(config: TrainConfig) -> None:
    """Refuse options that mean something else, or nothing, on verl.

    Raises:
        ConfigError: says which, and what to do.
    """
    problems = {
        f"verl knows no algorithm {config.algorithm!r}. Use one of: {', '.join(RECIPES)}.": config.algorithm
        not in RECIPES,
        f"verl weighs no {config.loss_aggregation}. Use one of: {', '.join(AGGREGATIONS)}.": config.loss_aggregation
        not in AGGREGATIONS,
        "verl takes the divergence off the reward only with a critic. Set kl_in = loss, or algorithm = ppo.": (
            config.kl_coef > 0 and config.kl_in == "reward" and not recipe_of(config.algorithm).critic
        ),
        "verl averages the entropy over tokens. Set loss_aggregation = token-mean, or entropy_coef = 0.": (
            config.entropy_coef > 0 and config.loss_aggregation != "token-mean"
        ),
        "verl's trainer draws a batch once: groups are replaced on backend = torch only. Set resample = 0.": (
            config.resample > 0
        ),
        "verl trains with one temperature for all calls, above 0. Set temperature, or leave it out for 1.": (
            config.temperature is not None and config.temperature <= 0
        ),
        "with kl_coef, verl averages the divergence over tokens. Set loss_aggregation = token-mean, or kl_coef = 0.": (
            config.kl_coef > 0 and config.loss_aggregation != "token-mean"
        ),
        "algorithm = ppo weighs tokens by the critic. Set loss_aggregation = token-mean.": (
            recipe_of(config.algorithm).critic and config.loss_aggregation != "token-mean"
        ),
        f"device = {config.device!r} names one device. With verl, say cpu, or give the number of gpus.": (
            config.device not in {"auto", "cpu", "cuda"}
        ),
        "backend_options are of the torch backend. With verl, put its own options into the table verl.": bool(
            config.backend_options
        ),
        "until stops a run early; verl's trainer runs a number of steps. Leave until out, and set steps.": (
            config.until is not None
        ),
        f"batch_size = {config.batch_size} tasks of {config.group_size} rollouts are fewer than the accelerators.": (
            config.batch_size * config.group_size < config.gpus * config.nodes
        ),
    }
    for message, wrong in problems.items():
        if wrong:
            raise ConfigError(message)


def _derived(config: TrainConfig, place: Place, context: int) -> dict[str, tuple[Any, str]]:
    """Options that follow from the user's, each with the name under which the user sets it."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    answer = min(config.max_tokens or context // 2, context - 1)
    validates = config.val is not None
    return {
        "algorithm.adv_estimator": (_estimator(config), "algorithm and loss_aggregation"),
        "algorithm.norm_adv_by_std_in_grpo": (config.normalise_std, "normalise_std"),
        "critic.enable": (recipe_of(config.algorithm).critic, "algorithm"),
        **_critic(config),
        "data.train_batch_size": (config.batch_size, "batch_size"),
        "data.max_prompt_length": (context - answer, "max_model_len"),
        "data.max_response_length": (answer, "max_tokens"),
        "actor_rollout_ref.model.path": (model_path(config), "model"),
        "actor_rollout_ref.model.lora_rank": (config.lora_rank, "lora_rank"),
        "actor_rollout_ref.model.lora_alpha": (_alpha(config), "lora_alpha"),
        f"{actor}.optim.lr": (config.learning_rate, "learning_rate"),
        f"{actor}.grad_clip": (config.max_grad_norm, "max_grad_norm"),
        f"{actor}.optim.clip_grad": (config.max_grad_norm, "max_grad_norm"),
        f"{actor}.clip_ratio": (config.clip_low, "clip_low"),
        f"{actor}.clip_ratio_low": (config.clip_low, "clip_low"),
        f"{actor}.clip_ratio_high": (config.clip_high, "clip_high"),
        f"{actor}.loss_agg_mode": ("token-mean", "loss_aggregation"),
        f"{actor}.policy_loss.loss_mode": (LOSSES[recipe_of(config.algorithm).loss], "algorithm"),
        f"{actor}.entropy_coeff": (config.entropy_coef, "entropy_coef"),
        f"{actor}.use_kl_loss": (config.kl_coef > 0 and config.kl_in == "loss", "kl_coef and kl_in"),
        f"{actor}.kl_loss_type": (_kl_name(config), "kl_estimator"),
        "algorithm.use_kl_in_reward": (config.kl_coef > 0 and config.kl_in == "reward", "kl_coef and kl_in"),
        "algorithm.kl_penalty": (_kl_name(config), "kl_estimator"),
        "algorithm.kl_ctrl.kl_coef": (config.kl_coef, "kl_coef"),
        f"{actor}.kl_loss_coef": (config.kl_coef, "kl_coef"),
        f"{actor}.ppo_mini_batch_size": (config.batch_size, "batch_size"),
        f"{rollout}.n": (config.group_size, "group_size"),
        f"{rollout}.temperature": (config.temperature or 1.0, "temperature"),
        f"{rollout}.dtype": (_rollout_dtype(config), "dtype"),
        f"{rollout}.max_model_len": (context, "max_model_len"),
        f"{rollout}.seed": (config.seed, "seed"),
        f"{rollout}.val_kwargs.n": (config.val_samples, "val_samples"),
        f"{rollout}.val_kwargs.temperature": (config.temperature or 1.0, "temperature"),
        f"{rollout}.val_kwargs.do_sample": (True, "val_samples"),
        "trainer.device": ("cpu" if config.device == "cpu" else "cuda", "device"),
        "trainer.n_gpus_per_node": (config.gpus, "gpus"),
        "trainer.nnodes": (config.nodes, "nodes"),
        "trainer.total_training_steps": (place.steps, "steps"),
        "trainer.save_freq": (config.save_every, "save_every"),
        "trainer.max_actor_ckpt_to_keep": (config.keep, "keep"),
        "trainer.max_critic_ckpt_to_keep": (config.keep, "keep"),
        "trainer.val_before_train": (validates and place.resume is None, "val"),
        "trainer.test_freq": ((config.val_every or place.steps) if validates else -1, "val_every"),
        "trainer.default_local_dir": (str(place.folder / "checkpoints"), "out"),
        "trainer.resume_mode": ("disable" if place.resume is None else "resume_path", "resume"),
        "trainer.resume_from_path": (None if place.resume is None else str(place.resume), "resume"),
    }


def _connecting(config: TrainConfig, place: Place) -> Values:
    """Options through which verl meets this trainer."""
    validation = config.val or config.data
    return {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "lightning_async" if config.staleness else "lightning_sync",
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{HERE}.replay",
        "trainer.v1.sampler.custom_sampler.name": "AsyncReplay" if config.staleness else "SyncReplay",
        "trainer.v1.sampler.max_off_policy_threshold": config.staleness + 1 if config.staleness else None,
        "trainer.checkpoint_callback_class": f"{HERE}.checkpoints.RegisterCheckpoint",
        "actor_rollout_ref.model.external_lib": f"{HERE}.registrations",
        "critic.model.external_lib": f"{HERE}.registrations",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": f"{HERE}.collect.RolloutCollector",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.mode": "async",
        "data.custom_cls.path": f"pkg://{HERE}.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": f"train:{config.data.absolute()}",
        "data.val_files": f"val:{validation.absolute()}",
        "data.shuffle": False,  # the data set is in the order of the run already
        "data.validation_shuffle": False,
        "trainer.total_epochs": 1,  # one pass over the run's own order of tasks, whatever the number of epochs
        "+data.lightning": {"steps": place.steps + config.staleness, "seed": config.seed},
        "+lightning.url": place.url,
        "+lightning.key_file": str(place.key_file),
        "+lightning.config": str(place.folder / CONFIG_NAME),
    }


def _estimator(config: TrainConfig) -> str:
    """Name the advantage estimator: verl's own with a critic, else one of those that `estimators` registers."""
    recipe = recipe_of(config.algorithm)
    if recipe.critic:
        return "gae"
    return ("lightning_whitened" if recipe.whiten else "lightning") + AGGREGATIONS[config.loss_aggregation]


def _critic(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    options = {
        "algorithm.lam": (config.gae_lambda, "gae_lambda"),
        "critic.optim.lr": (config.value_learning_rate, "value_learning_rate"),
        "critic.cliprange_value": (config.value_clip, "value_clip"),
    }
    return {key: (value, name) for key, (value, name) in options.items() if value is not None}


def _kl_name(config: TrainConfig) -> str:
    return config.kl_estimator.replace("low_var", "low_var_kl")


def _alpha(config: TrainConfig) -> int:
    alpha = config.lora_alpha or 2.0 * (config.lora_rank or 8)
    if alpha != int(alpha):
        raise ConfigError(f"lora_alpha = {alpha}: verl takes whole numbers.")
    return int(alpha)


def _rollout_dtype(config: TrainConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if config.device == "cpu" else "bfloat16"


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give a table's options by dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _refuse(passed: Mapping[str, Any], derived: Mapping[str, tuple[Any, str]], connecting: Mapping[str, Any]) -> None:
    held = {key.lstrip("+") for key in connecting}
    for key in passed:
        bare = key.lstrip("+~")
        if bare in derived:
            raise ConfigError(f"verl's option {bare} follows from {derived[bare][1]}. Set that, and not verl's.")
        if any(bare == other or bare.startswith(f"{other}.") for other in held):
            raise ConfigError(f"verl's option {bare} connects verl with this trainer. It can't be changed.")
