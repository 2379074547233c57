"""verl's critic on CPU: its engine, with an attention that a CPU has.

verl loads value models with flash attention, by name, whatever the options say; there is no build of it for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead


class ValueEngineCPU(FSDPEngineWithValueHead):  # type: ignore[misc]  # verl has no types
    """Registered for value models on the device `cpu`."""

    def _build_module(self) -> Any:
        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = 0.0
        model = AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=self.model_config.trust_remote_code,
        )
        if self.model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model
