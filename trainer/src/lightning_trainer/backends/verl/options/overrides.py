"""Conversion of the user's configuration to verl's options: one function, without importing verl.

There are three kinds of keys. Those derived from an option of `TrainConfig` can only be changed there. Those that
connect verl with this trainer cannot be changed. All others are defaults, which the table `verl` of the configuration
overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.verl.options.adapters import adapter_options
from lightning_trainer.backends.verl.options.algorithms import AGGREGATIONS, on_verl
from lightning_trainer.backends.verl.options.packing import settle
from lightning_trainer.backends.verl.options.profiles import OF_OWN_RAY, Values, defaults, model_path, on_cpu
from lightning_trainer.config.files import CONFIG_NAME
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models.shape import Shape

HERE: Final = "lightning_trainer.backends.verl"
DEFAULT_CONTEXT: Final = 4096  # if neither the configuration nor the model gives the longest context


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The location of the run, which verl's processes need.

    Attributes:
        folder: the run's folder, on storage that all nodes share.
        url: of the run's own server.
        key_file: file with its admin key.
        steps: optimiser steps of the whole run.
        resume: verl's checkpoint folder to resume from; None: from the start.
    """

    folder: Path
    url: str = "http://127.0.0.1:0"
    key_file: Path = Path("admin.key")
    steps: int = 1
    resume: Path | None = None


def overrides(config: TrainConfig, site: Site, shape: Shape | None, *, flash_attention: bool) -> Values:
    """Return verl's options, by dotted key, on top of its `ppo_trainer` configuration.

    Args:
        config: of the run.
        site: its location.
        shape: of the model; None if it cannot be read.
        flash_attention: whether the package flash_attn is installed, which packs rows and which a critic on GPUs needs.

    Raises:
        ConfigError: verl does not support an option, or the table `verl` sets a key that it may not set.
    """
    check(config)
    if on_verl(config).critic and config.device != "cpu" and not flash_attention:
        raise ConfigError("verl's critic needs flash attention. Install flash-attn, or use another algorithm.")
    context = config.max_model_len or (shape.context if shape else DEFAULT_CONTEXT)
    if shape and context > shape.context and not shape.stretched:
        raise ConfigError(f"max_model_len {context} is more than the {shape.context} tokens of {config.model}.")
    if shape and context > shape.context and shape.longrope:
        raise ConfigError(
            f"{config.model} has other positions above {shape.context} tokens (longrope). vLLM would have them for all"
            f" sequences, and verl's learner only for long ones. Set max_model_len to at most {shape.context}, or use"
            " backend = torch."
        )
    derived = _derived_options(config, site, context)
    connecting = _connection_options(config, site)
    passed = dict(flatten(config.verl))
    values = defaults(config, shape, flash_attention=flash_attention) | adapter_options(config.lora_rank, passed)
    if config.device == "cpu":
        values |= on_cpu(config)
    _refuse(passed, derived, connecting)
    known = {key.lstrip("+"): key for key in values}
    for key, value in passed.items():
        bare = key.lstrip("+")
        values[known.get(bare, key)] = value
    settle(values, flash_attention=flash_attention)
    if values["+ray_kwargs.ray_init.address"] != "local":
        given = {key.lstrip("+") for key in passed}
        values = {key: value for key, value in values.items() if key not in OF_OWN_RAY or key.lstrip("+") in given}
    return {**{key: value for key, (value, _) in derived.items()}, **values, **connecting}


def check(config: TrainConfig) -> None:
    """Reject options that mean something else, or nothing, on verl.

    Raises:
        ConfigError: the message says which, and what to do.
    """
    refuse({**_of_learner(config), **_of_loss(config), **_of_sampling(config), **_of_run(config)})


def _of_learner(config: TrainConfig) -> dict[str, bool]:
    """Return error messages about options of the learner, each with whether it applies."""
    return {
        "verl writes its own checkpoints. Leave checkpoint out.": config.checkpoint != "newest",
        "old_logprobs = engine, update_epochs and minibatches are for backend = torch. Leave them out, and give verl's"
        " own in the table verl.": (
            config.old_logprobs == "engine" or (config.update_epochs, config.minibatches) != (1, 1)
        ),
        "importance_moment is for backend = torch. Leave it out, or use importance_cap and importance_mask.": (
            config.importance_moment is not None
        ),
        "agent_weight is for backend = torch or tinker: verl's loss has no weight for an agent. Leave it out.": bool(
            config.agent_weight
        ),
        "task_order = curriculum is for backend = torch or tinker: verl shuffles the tasks. Leave it out.": (
            config.task_order != "shuffled"
        ),
        "judge: second_model is for backend = torch or tinker. Leave it out.": "second_model" in config.judge,
        "rollback_on_cliff is for backend = torch. Leave it out.": (config.rollback_on_cliff),
        "schedule and opponents are for backend = torch: verl trains one policy. Leave them out.": (
            config.schedule is not None or bool(config.opponents)
        ),
        "with_prompts is for backend = torch or tinker: verl samples a batch once, and makes its rows itself. Leave it"
        " out.": config.with_prompts,
        "verl has no lr_schedule = linear. Use cosine or constant.": config.lr_schedule == "linear",
        "verl compares each group when it ends, before there is a batch. Leave alone out, or train on backend ="
        " torch.": config.alone != "skip",
        "verl's loss takes one advantage per token, and its workers read only the prompts that were sampled"
        " from. teacher = self needs backend = torch. Leave teacher out.": config.teacher is not None,
        "verl trains one policy for all agents. Leave policies out, or train an adapter for each agent with"
        " --backend torch --engine vllm.": bool(config.policies),
    }


def _of_loss(config: TrainConfig) -> dict[str, bool]:
    """Return error messages about options of the loss, each with whether it applies."""
    return {
        f"verl has no loss_aggregation = {config.loss_aggregation}. Use one of: {', '.join(AGGREGATIONS)}.": (
            config.loss_aggregation not in AGGREGATIONS
        ),
        "verl takes the divergence off the reward only with a critic. Set kl_in = loss, or algorithm = ppo.": (
            config.kl_coef > 0 and config.kl_in == "reward" and not on_verl(config).critic
        ),
        "verl averages the entropy over tokens. Set loss_aggregation = token-mean, or entropy_coef = 0.": (
            config.entropy_coef > 0 and config.loss_aggregation != "token-mean"
        ),
        "with kl_coef, verl averages the divergence over tokens. Set loss_aggregation = token-mean, or kl_coef = 0.": (
            config.kl_coef > 0 and config.loss_aggregation != "token-mean"
        ),
        "algorithm = ppo weighs tokens by the critic. Set loss_aggregation = token-mean.": (
            on_verl(config).critic and config.loss_aggregation != "token-mean"
        ),
    }


def _of_sampling(config: TrainConfig) -> dict[str, bool]:
    """Return error messages about options of sampling, each with whether it applies."""
    return {
        "verl's trainer samples a batch once: calls are sampled again on backend = torch only. Choose another credit"
        " than counterfactual, and leave orders out.": config.uses_forks or config.by_coalitions,
        "verl's trainer samples a batch once: groups are replaced on backend = torch only. Set resample = 0.": (
            config.resample > 0
        ),
        "verl trains with one temperature for all calls, above 0. Set temperature, or leave it out for 1.": (
            config.temperature is not None and config.temperature <= 0
        ),
    }


def _of_run(config: TrainConfig) -> dict[str, bool]:
    """Return error messages about the devices, the engine and the length, each with whether it applies."""
    return {
        f"device = {config.device!r} names one device. With verl, say cpu, or give the number of gpus.": (
            config.device not in {"auto", "cpu", "cuda"}
        ),
        "backend_options belong to the torch backend. With verl, put its own options into the table verl.": bool(
            config.backend_options
        ),
        "engine, engine_python, engine_url, engine_gpus and engine_options belong to the torch backend: verl always"
        " samples with vLLM. Leave them out.": (
            (config.engine, config.engine_python, config.engine_url, config.engine_gpus) != (None,) * 4
            or bool(config.engine_options)
        ),
        "until stops a run early; verl's trainer runs a number of steps. Leave until out, and set steps.": (
            config.until is not None
        ),
        f"batch_size = {config.batch_size} tasks of {config.group_size} rollouts are fewer than the accelerators.": (
            config.batch_size * config.group_size < config.gpus * config.nodes
        ),
    }


def _derived_options(config: TrainConfig, site: Site, context: int) -> dict[str, tuple[Any, str]]:
    """Return the options that follow from the user's, each with the name under which the user sets it."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    validates = config.val is not None
    return {
        "algorithm.adv_estimator": (
            on_verl(config).estimator_for(config.loss_aggregation),
            "algorithm and loss_aggregation",
        ),
        "algorithm.norm_adv_by_std_in_grpo": (config.normalise_std, "normalise_std"),
        "critic.enable": (on_verl(config).critic, "algorithm"),
        **_critic(config),
        **_rate(config),
        **_correction(config),
        "data.train_batch_size": (config.batch_size, "batch_size"),
        # vLLM cuts off every answer at the second, whatever its request sets. The gateway applies max_tokens.
        "data.max_prompt_length": (1, "max_model_len"),
        "data.max_response_length": (context - 1, "max_model_len"),
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
        f"{actor}.policy_loss.loss_mode": (on_verl(config).loss, "algorithm"),
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
        "trainer.total_training_steps": (site.steps, "steps"),
        "trainer.save_freq": (config.save_every, "save_every"),
        "trainer.max_actor_ckpt_to_keep": (config.keep, "keep"),
        "trainer.max_critic_ckpt_to_keep": (config.keep, "keep"),
        "trainer.val_before_train": (validates and site.resume is None, "val"),
        "trainer.test_freq": ((config.val_every or site.steps) if validates else -1, "val_every"),
        "trainer.default_local_dir": (str(site.folder / "checkpoints"), "out"),
        "trainer.resume_mode": ("disable" if site.resume is None else "resume_path", "resume"),
        "trainer.resume_from_path": (None if site.resume is None else str(site.resume), "resume"),
    }


def _connection_options(config: TrainConfig, site: Site) -> Values:
    """Return the options that connect verl with this trainer."""
    validation = config.val or config.data
    return {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "lightning_async" if config.staleness else "lightning_sync",
        "trainer.v1.sampler.custom_sampler.path": f"pkg://{HERE}.steps.replay",
        "trainer.v1.sampler.custom_sampler.name": "AsyncReplay" if config.staleness else "SyncReplay",
        "trainer.v1.sampler.max_off_policy_threshold": config.staleness + 1 if config.staleness else None,
        "trainer.checkpoint_callback_class": f"{HERE}.steps.checkpoints.RegisterCheckpoint",
        "actor_rollout_ref.model.external_lib": f"{HERE}.registrations",
        "critic.model.external_lib": f"{HERE}.registrations",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": f"{HERE}.steps.collect.RolloutCollector",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.mode": "async",
        "data.custom_cls.path": f"pkg://{HERE}.steps.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": f"train:{config.data.absolute()}",
        "data.val_files": f"val:{validation.absolute()}",
        "data.shuffle": False,  # the data set is already in the run's order
        "data.validation_shuffle": False,
        "trainer.total_epochs": 1,  # one pass over the run's own order of tasks, whatever the number of epochs
        "+data.lightning": {
            "steps": site.steps + config.staleness,
            "seed": config.seed,
            "columns": list(config.columns),
        },
        "+lightning.url": site.url,
        "+lightning.key_file": str(site.key_file),
        "+lightning.config": str(site.folder / CONFIG_NAME),
    }


def _critic(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    options = {
        "algorithm.lam": (config.gae_lambda, "gae_lambda"),
        "critic.optim.lr": (config.value_learning_rate, "value_learning_rate"),
        "critic.cliprange_value": (config.value_clip, "value_clip"),
    }
    return {key: (value, name) for key, (value, name) in options.items() if value is not None}


def _rate(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    optim = "actor_rollout_ref.actor.optim"
    options: dict[str, tuple[Any, str]] = {}
    if config.warmup_steps:
        options[f"{optim}.lr_warmup_steps"] = (config.warmup_steps, "warmup_steps")
    if config.lr_schedule != "constant":
        options[f"{optim}.lr_scheduler_type"] = (config.lr_schedule, "lr_schedule")
        options[f"{optim}.min_lr_ratio"] = (config.min_lr_ratio, "min_lr_ratio")
    return options


def _correction(config: TrainConfig) -> dict[str, tuple[Any, str]]:
    """Return the options that correct for the gap between engine and trainer: capped token weights, and a mask."""
    correction = "algorithm.rollout_correction"
    options: dict[str, tuple[Any, str]] = {}
    if config.importance_cap is not None:
        options[f"{correction}.rollout_is"] = ("token", "importance_cap")
        options[f"{correction}.rollout_is_threshold"] = (config.importance_cap, "importance_cap")
    if config.importance_mask is not None:
        # k1 is the logarithm of the ratio: between 1 / mask and mask.
        bounds = f"{1 / config.importance_mask}_{config.importance_mask}"
        options[f"{correction}.rollout_rs"] = ("token_k1", "importance_mask")
        options[f"{correction}.rollout_rs_threshold"] = (bounds, "importance_mask")
    return options


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
    """Yield a table's options by dotted key."""
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
            raise ConfigError(
                f"verl's option {bare} follows from {derived[bare][1]}. Set that option instead of verl's."
            )
        if any(bare == other or bare.startswith(f"{other}.") for other in held):
            raise ConfigError(f"verl's option {bare} connects verl with this trainer. It can't be changed.")
