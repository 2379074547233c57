"""Options of verl without a counterpart in `TrainConfig`: defaults for accelerators, and the changes for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from lightning_trainer.backends.verl.options.algorithms import on_verl
from lightning_trainer.backends.verl.options.needs import (
    GIB,
    LEAST,
    MICRO_BATCH,
    Requirements,
    estimate,
    tensor_parallel,
)
from lightning_trainer.backends.verl.options.packing import packing
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.engines.devices import gpu_totals
from lightning_trainer.models.shape import Shape

Values = dict[str, Any]

TRANSFER_S: Final = 600.0  # longest time in seconds for new weights to reach vLLM
_ROWS_OF_TOKENS_CPU: Final = 1024  # logits over a vocabulary of 50,000: 0.2 GiB, several times over
# Resources declared for a run's own Ray; an existing cluster has its own. verl and TransferQueue request ten cores, and
# three more for each accelerator, to leave them idle: if there are fewer, they wait forever.
OF_OWN_RAY: Final = ("ray_kwargs.ray_init.num_cpus", "+ray_kwargs.ray_init.num_gpus")
LOGPROBS_MODE: Final = "actor_rollout_ref.rollout.logprobs_mode"


def logprobs_mode(config: TrainConfig) -> str:
    """Return vLLM's mode: before penalties, top-p and top-k, over the whole vocabulary, as the trainer computes them.

    If the temperature is not 1, only log-probabilities after all of them include the temperature.
    """
    return "raw_logprobs" if config.temperature in {None, 1.0} else "processed_logprobs"


def defaults(config: TrainConfig, shape: Shape | None, *, flash_attention: bool) -> Values:
    """Return the options without a counterpart in `TrainConfig`. The table `verl` changes them."""
    actor, rollout, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    tokens = _micro_batch(config, shape)
    values: Values = {
        **packing(model_path(config), flash_attention=flash_attention),
        f"{model}.enable_gradient_checkpointing": True,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        f"{actor}.clip_ratio_c": 1e9,  # the bound of dual-clip PPO, out of reach: the torch backend has none
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.betas": [0.9, 0.99],  # those of the torch backend
        f"{actor}.fsdp_config.seed": config.seed,
        f"{actor}.data_loader_seed": config.seed,
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{actor}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        f"{rollout}.tensor_model_parallel_size": tensor_parallel(shape, config.gpus),
        f"{rollout}.gpu_memory_utilization": 0.5,
        f"{rollout}.enable_chunked_prefill": True,
        LOGPROBS_MODE: logprobs_mode(config),
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 0,  # rewards come with the rollouts
        f"{rollout}.agent.num_workers": 1,
        "+lightning.transfer_s": TRANSFER_S,
        "trainer.logger": ["console"],
        "trainer.project_name": "lightning",
        "trainer.experiment_name": "run",
    }
    if config.nodes > 1:
        values["+ray_kwargs.ray_init.address"] = "auto"  # the cluster that was started before
    else:
        values["+ray_kwargs.ray_init.address"] = "local"  # a separate Ray, whatever else uses Ray on this machine
        values["+ray_kwargs.ray_init.include_dashboard"] = False
        values["ray_kwargs.ray_init.num_cpus"] = 12 + 4 * config.gpus  # logical
    if on_verl(config).critic:
        values |= {
            "critic.strategy": "fsdp2",
            "critic.model.path": model_path(config),
            "critic.ppo_max_token_len_per_gpu": tokens,
            "critic.optim.weight_decay": 0.0,
        }
    if config.staleness:
        values |= {
            # Slow tasks, the hard ones, would be dropped; so the step waits for groups that would get too old.
            "trainer.v1.sampler.max_off_policy_strategy": "wait",
            "trainer.v1.colocate_async.num_warmup_batches": config.staleness,
        }
    return values


def _micro_batch(config: TrainConfig, shape: Shape | None) -> int:
    """Return the most tokens that a GPU processes at once: what fits into the smallest one here, if that is known."""
    memory = gpu_totals()
    if shape is None or not memory or config.device == "cpu":
        return MICRO_BATCH
    return max(LEAST, needs_of(config, shape).micro_batch(min(memory) / GIB))


def needs_of(config: TrainConfig, shape: Shape, *, parallel: int = 1, tokens: int = LEAST) -> Requirements:
    """Estimate the memory of one accelerator.

    Args:
        config: of the run.
        shape: of the model.
        parallel: accelerators that share a vLLM replica.
        tokens: of a micro-batch.
    """
    return estimate(
        shape,
        accelerators=config.gpus * config.nodes,
        tensor_parallel=parallel,
        tokens=tokens,
        lora=config.lora_rank > 0,
        reference=config.kl_coef > 0,
        critic=on_verl(config).critic,
    )


def on_cpu(config: TrainConfig) -> Values:
    """Return the options for a machine without an accelerator: logical devices, vLLM never asleep.

    Learning computes in float32, as vLLM does, unless ``dtype`` sets both to bfloat16: many times faster if the
    processor multiplies bfloat16. The optimiser's weights are float32 in either case.
    """
    actor, rollout, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    computed = "bf16" if config.dtype == "bfloat16" else "fp32"
    mixed = {"param_dtype": computed, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    values: Values = {
        f"{model}.enable_gradient_checkpointing": False,
        f"{actor}.ppo_max_token_len_per_gpu": _ROWS_OF_TOKENS_CPU,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": mixed,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.free_cache_engine": False,
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.gpu_memory_utilization": 0.1,
        f"{rollout}.max_num_seqs": 32,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 512,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.runtime_env.env_vars": {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    if config.nodes == 1:
        values["+ray_kwargs.ray_init.num_gpus"] = config.gpus  # logical: verl's workers request them
    if on_verl(config).critic:
        values |= {
            "critic.ppo_max_token_len_per_gpu": _ROWS_OF_TOKENS_CPU,
            "critic.model.enable_gradient_checkpointing": False,
            "critic.fsdp.use_torch_compile": False,
            "+critic.fsdp.mixed_precision": mixed,
        }
    return values


def model_path(config: TrainConfig) -> str:
    """Return the absolute path of a local folder, for processes elsewhere; a hub id unchanged."""
    folder = Path(config.model)
    return str(folder.absolute()) if folder.is_dir() else config.model
