"""Options of learning, which the commands that learn and the learner itself have."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from lightning_trainer.choices import Aggregation, KlEstimator, Schedule
from lightning_trainer.options.record import OptionRecord


class LengthOptions(OptionRecord):
    """How long training takes."""

    steps: int | None = Field(default=None, ge=1)
    """Number of training steps, one batch each."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the tasks or conversations, instead of steps. Default: 1 if neither is given; for sft 2."""


def steps_of_epochs(epochs: float, count: int, batch_size: int) -> int:
    """Return the number of steps in so many passes over rows, at least 1.

    The passes count as they are written: 1.1 passes over 100 rows in batches of 10 are 11 steps, not 12.
    """
    return max(1, math.ceil(Fraction(str(epochs)) * count / batch_size))


class AlgorithmOptions(OptionRecord):
    """The algorithm."""

    algorithm: str = "grpo"
    """`grpo`, `dr-grpo`, `dapo`, `gspo`, `cispo`, `rloo`, `reinforce++`, `reinforce++-baseline`, `rae`, `ppo`,
    `distil`, or one that a plugin registers. Each sets the hyperparameters of its paper as defaults."""


class CreditOptions(OptionRecord):
    """The rewards of an attempt, and how its calls share them."""

    credit: str = "identical"
    """Credit assignment, from the rewards of an attempt to its calls: identical, discounted, last, per-agent, turn,
    gigpo, counterfactual, or one that a plugin registers."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount factor per turn for credit = discounted (default 0.9), turn (1) and gigpo (0.95)."""
    credit_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the credit assignment, such as omega and anchor of gigpo."""
    rewards: dict[str, Any] = Field(default_factory=dict)
    """Automatic rewards, by the name of the rule: its weight, such as tool_status = 0.1, or a table of weight and
    options. Default: none."""


class RateOptions(OptionRecord):
    """The learning rate."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Learning rate of AdamW. With LoRA, the default is 1e-4."""


class GradientOptions(OptionRecord):
    """How gradients are limited."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""


class OptimizerOptions(GradientOptions):
    """How the optimiser moves the weights."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""


class AdapterOptions(OptionRecord):
    """Size of the adapters."""

    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters; 0 trains all weights. With policies, the default is 16."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """LoRA scale. Default: twice the rank."""
    base_bits: int | None = None
    """Quantise the frozen model under LoRA adapters to 4 or 8 bits, as QLoRA does. Needs bitsandbytes (torch)."""


class LossOptions(OptionRecord):
    """What an update computes from a batch, and how often."""

    loss_aggregation: Aggregation = "token-mean"
    """How token losses are averaged: equal weight for every token of the batch (token-mean), every response
    (sequence-mean), every row (row-mean) or every rollout (rollout-mean); or summed per response, then averaged
    (sequence-sum)."""
    agent_weight: Literal["equal"] | dict[str, float] = Field(default_factory=dict)
    """Weight of each agent's calls in the loss: AGENT=WEIGHT, separated by commas (default 1), or `equal`, so that the
    tokens of each agent that shares a policy weigh the same together, however much it says (torch and tinker)."""
    clip_low: float = Field(default=0.2, gt=0)
    """Lower clip range: the probability ratio is clipped below 1 minus this. 1 or more means no lower bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper clip range: the probability ratio is clipped above 1 plus this."""
    old_logprobs: Literal["engine", "recompute"] | None = None
    """Log-probabilities in the denominator of the ratio: those recorded by the engine (engine), or those computed by
    the trainer before the update, which costs a forward pass (recompute, torch). Default: recompute with gspo
    and with staleness, otherwise engine; verl always recomputes."""
    update_epochs: int = Field(default=1, ge=1)
    """Passes over each batch (torch). With one pass, one minibatch and recomputed log-probabilities all ratios are 1,
    and clipping has no effect."""
    minibatches: int = Field(default=1, ge=1)
    """Minibatches per batch, each with its own optimiser step (torch)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear learning-rate warmup."""
    lr_schedule: Schedule = "constant"
    """Learning-rate schedule after the warmup: constant, linear (torch) or cosine."""
    min_lr_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Final learning rate of a decaying schedule, as a share of learning_rate."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: each token is weighted by the trainer's probability over the engine's, capped at
    this value. On torch with old_logprobs = recompute. Default with staleness: 2."""
    importance_mask: float | None = Field(default=None, gt=1)
    """Leave tokens out of the loss if the probabilities of trainer and engine differ by more than this factor. On torch
    with old_logprobs = recompute."""
    importance_moment: float | None = Field(default=None, gt=0)
    """M2PO: leave out the tokens whose probabilities differ most, until the mean of the squared log-ratios is at most
    this, such as 0.04. Without importance_cap, the other tokens are weighted by their ratio (torch and tinker)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """KL penalty coefficient against the starting policy; 0 keeps no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Apply the KL penalty to the loss (per token) or to the reward (per call)."""
    kl_estimator: KlEstimator = "k3"
    """KL estimator; a + uses the gradient of k2. low_var is another name for k3."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus coefficient."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of generalised advantage estimation (ppo). Default: 1, which depends least on the value head."""
    value_learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of the value head (ppo). Default: 1e-3; 1e-5 on verl, where the critic is a model of its own."""
    value_clip: float | None = Field(default=None, gt=0)
    """Maximum change of a value in one update (ppo). Default: no limit; 0.5 on verl."""
