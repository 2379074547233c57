"""Names that other trainers use for our options, so that an error can suggest ours.

They are those of TRL, verl, transformers' `TrainingArguments`, OpenRLHF, PEFT, Axolotl, Unsloth,
verifiers and the Tinker cookbook, and plain words such as `tasks_per_step`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_OURS: Final = {
    "advantage_estimator": ("algorithm",),
    "adv_estimator": ("algorithm",),
    "beta": ("kl_coef",),
    "cliprange": ("clip_low",),
    "dataset": ("data",),
    "dataset_name": ("data",),
    "epsilon": ("clip_low",),
    "epsilon_high": ("clip_high",),
    "entropy_coeff": ("entropy_coef",),
    "eval_data": ("val",),
    "eval_file": ("val",),
    "eval_steps": ("val_every", "eval_every"),
    "gradient_clipping": ("max_grad_norm",),
    "groups_per_batch": ("batch_size",),
    "init_kl_coef": ("kl_coef",),
    "kl_coeff": ("kl_coef",),
    "load_in_4bit": ("base_bits",),
    "load_in_8bit": ("base_bits",),
    "kl_loss_coef": ("kl_coef",),
    "lora_r": ("lora_rank",),
    "loss_agg_mode": ("loss_aggregation",),
    "loss_type": ("loss_aggregation", "loss"),
    "lr": ("learning_rate",),
    "lr_scheduler_type": ("lr_schedule",),
    "max_completion_length": ("max_tokens", "answer_tokens"),
    "max_length": ("max_model_len",),
    "max_new_tokens": ("max_tokens", "answer_tokens"),
    "max_response_length": ("max_tokens", "answer_tokens"),
    "max_seq_length": ("max_model_len", "max_length"),
    "max_steps": ("steps",),
    "model_name_or_path": ("model",),
    "n_samples_per_prompt": ("group_size", "samples"),
    "num_epochs": ("epochs",),
    "num_generations": ("group_size", "samples"),
    "num_iterations": ("update_epochs",),
    "num_train_epochs": ("epochs",),
    "num_rollouts": ("group_size", "samples"),
    "num_steps": ("steps",),
    "output": ("out",),
    "output_dir": ("out",),
    "per_device_train_batch_size": ("batch_size",),
    "ppo_epochs": ("update_epochs",),
    "r": ("lora_rank",),
    "report_to": ("trackers",),
    "resume_from_checkpoint": ("resume",),
    "rollout_batch_size": ("batch_size",),
    "rollout_n": ("group_size",),
    "rollouts_per_example": ("group_size", "samples"),
    "rollouts_per_task": ("group_size", "samples"),
    "save_steps": ("save_every",),
    "scale_rewards": ("normalise_std",),
    "tasks_per_step": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "train_file": ("data",),
    "train_files": ("data",),
    "use_vllm": ("engine",),
    "val_files": ("val",),
}


def translate(name: str, known: Container[str]) -> str | None:
    """Return our option for another trainer's option, if it is one of those known.

    Args:
        name: as the other trainer writes it, with hyphens or underscores.
        known: the existing options, with underscores.
    """
    return next((ours for ours in _OURS.get(name.replace("-", "_"), ()) if ours in known), None)
