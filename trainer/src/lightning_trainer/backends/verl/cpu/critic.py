"""verl's critic on CPU: verl's engine, with an attention that CPUs support.

verl always loads value models with flash attention, whatever the options say; flash attention has no build for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead


class ValueEngineCPU(FSDPEngineWithValueHead):  # type: ignore[misc]  # verl has no types
    """The engine registered for value models on the device `cpu`."""

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
