"""verl's trainers with our rollouts: registered under our names, and otherwise verl's own.

Added at verl's hooks: calls are held while weights change, the log-probabilities of engine and trainer are compared at
each step, a weight transfer has a time limit, one batch is one optimiser step however many rows it has.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import ray
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from lightning_trainer.backends.verl.control import RunServerClient
from lightning_trainer.backends.verl.steps import micro_batches
from lightning_trainer.backends.verl.steps.agreement import Agreement, WeightsError, agreement
from lightning_trainer.backends.verl.steps.gathered import waits_of_step
from lightning_trainer.backends.verl.workers import ActorWorker, CriticWorker
from lightning_trainer.report import learned_tokens
from lightning_trainer.report.learned_tokens import SeenTokens
from lightning_trainer.report.speed.waits import RolloutTime, Window
from lightning_trainer.report.step_metrics import of_ages
from lightning_trainer.rl.rows import UNKNOWN_VERSION

T = TypeVar("T")
_HELD_OUT: Final = "val/"


class _Lightning(PPOTrainer):  # type: ignore[misc]  # verl has no types
    """What both trainers add. A base class that comes before verl's own and calls its hooks."""

    kind: str  # verl's name of the trainer below, which verl reads in many places

    def __init__(self, config: Any) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.kind
        super().__init__(config)
        self._control = RunServerClient.of(config.lightning)
        self._transfer_s = float(config.lightning.transfer_s)
        self._agreement: Agreement | None = None
        self._ages: dict[str, float] = {}
        self._waiting_ns: Window = (0, 0)  # start and end of the step's wait for rollouts
        self._rollouts = RolloutTime(sampling=0.0, program=0.0, sampled=0.0)
        self._at_once: dict[str, Any] = {}  # how many rows or tokens of this batch workers process at once
        self._folder = Path(config.lightning.config).parent

    def fit(self, agent_loop_manager: Any) -> None:
        """Train; the replay buffer checks that rollouts are still collected."""
        self.replay_buffer.check = agent_loop_manager.check
        super().fit(agent_loop_manager)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        ours = {Role.ActorRollout: ActorWorker, Role.ActorRolloutRef: ActorWorker, Role.Critic: CriticWorker}
        for role in ours.keys() & self.role_worker_mapping.keys():
            self.role_worker_mapping[role] = ray.remote(ours[role])

    # Calls go to vLLM from here on: after the first weights, and after those of each step.

    def on_init_end(self) -> None:
        """Send the first weights, then allow calls."""
        self._within(super().on_init_end)
        self._serve()

    def on_step_end(self) -> None:
        """Send the new weights, then allow calls again."""
        self._within(super().on_step_end)
        self._serve()

    def on_sample_begin(self) -> None:
        """Record when the step begins to wait for rollouts."""
        super().on_sample_begin()
        self._waiting_ns = (time.time_ns(), 0)

    def on_sample_end(self) -> None:
        """Hold calls before vLLM sleeps; answers that are cut continue with the next weights."""
        self._waiting_ns = (self._waiting_ns[0], time.time_ns())
        self._control.pause()
        super().on_sample_end()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Take one step, and stop if vLLM did not sample from the weights that learn."""
        batch = super().step(metrics, timing_raw)
        numbers, self._rollouts = self.agent_loop_manager.take_ended([self._waiting_ns])
        numbers |= self._ages
        if self._agreement is not None:
            numbers |= self._agreement.metrics()
        metrics.update({f"lightning/{name}": value for name, value in numbers.items()})
        return batch

    def _validate(self) -> dict[str, float]:
        tasks = [self.val_dataset[place]["task"] for place in range(len(self.val_dataset))]
        result = self.agent_loop_manager.validate(tasks, self.global_steps)
        self._control.step("val", self.global_steps, result.metrics(), result.by_task)
        return {f"{_HELD_OUT}{name}": value for name, value in result.metrics().items()}

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info |= self._at_once
        batch = super()._compute_old_log_prob(batch, metrics)
        self._agreement = compare(batch, self.global_steps - 1)
        self._agreement.check()
        self._ages = of_ages(ages(batch.tags, self.global_steps - 1))
        learned_tokens.write(self._folder, self.global_steps - 1, read_seen_tokens(batch))
        self.agent_loop_manager.note_step(self.global_steps - 1, [key for key, _ in _rows(batch)])
        return batch

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], *args: Any, **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, *args, **kwargs)
        parts = waits_of_step(self._rollouts, timing_raw, metrics.get("lightning/tokens_generated", 0.0))
        metrics.update({f"lightning/{name}": value for name, value in parts.items()})
        # verl mixes this step's validation metrics into its own; they were already reported.
        own = {name: value for name, value in metrics.items() if not name.startswith(_HELD_OUT)}
        self._control.step("train", self.global_steps, own)

    # One optimiser step per batch: a rollout may have several rows, so their number is known only now.

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return math.lcm(dp_size, self.config.actor_rollout_ref.rollout.n)

    def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super()._balance_batch(batch, *args, **kwargs)
        prompts = len(batch) // self.config.actor_rollout_ref.rollout.n  # verl multiplies by it again
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = prompts
            if self.use_critic:
                self.config.critic.ppo_mini_batch_size = prompts
        self._bound_micro_batches(batch)
        return batch

    def _bound_micro_batches(self, batch: Any) -> None:
        actor, workers = self.config.actor_rollout_ref.actor, max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        if not actor.use_dynamic_bsz:  # the table `verl` says how many rows
            return
        batch.reorder(micro_batches.in_order([tag["seq_len"] for tag in batch.tags], workers))
        self._at_once = micro_batches.micro_batch_options(
            [tag["seq_len"] for tag in batch.tags],
            workers,
            actor.ppo_max_token_len_per_gpu,
            packed=self.config.actor_rollout_ref.model.use_remove_padding,
            sequence_parallel=self._get_n_gpus_for_throughput() // workers,
        )

    # verl drops a batch's extra info for the workers when it writes to the batch: each of these sets it again.

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info |= self._at_once
        batch = super()._compute_ref_log_prob(batch, metrics)
        batch.extra_info.pop("no_lora_adapter", None)  # verl 0.9.1 leaves it there, and the critic has none to turn off
        return batch

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info |= self._at_once
        return super()._compute_values(batch, metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info |= self._at_once
        return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info |= self._at_once
        return super()._update_actor(batch, metrics)

    def _serve(self) -> None:
        self._control.serve(self.llm_server_manager.server_addresses, self.global_steps)

    def _within(self, transfer: Callable[[], T]) -> T:
        """Send weights within the time limit, because verl's sender waits forever for a receiver that is gone."""
        return within(self._transfer_s, transfer)


@register_trainer("lightning_sync")
class SyncTrainer(_Lightning, PPOTrainerSync):  # type: ignore[misc]  # verl has no types
    """Alternates between collecting and learning."""

    kind = "sync"


@register_trainer("lightning_async")
class AsyncTrainer(_Lightning, PPOTrainerColocateAsync):  # type: ignore[misc]  # verl has no types
    """Collects the next batches while this one learns; answers that an update cuts continue with the new weights."""

    kind = "colocate_async"


def compare(batch: Any, version: int) -> Agreement:
    """Compare the log-probabilities of vLLM and of the trainer over the rows sampled by the current weights.

    Args:
        batch: verl's batch, after the trainer has computed its own.
        version: of the trainer's weights.
    """
    fresh = [key for key, tag in _rows(batch) if tag["min_global_steps"] == version]
    if not fresh:
        return agreement(np.empty(0), np.empty(0))
    fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=fresh, partition_id=batch.partition_id, select_fields=fields)
    engine, trainer, mask = (flat(data[name]) for name in fields)
    return agreement(engine[mask > 0], trainer[mask > 0])


def read_seen_tokens(batch: Any) -> dict[bytes, SeenTokens]:
    """Return what the trainer computed for the trained tokens of each row, by the row's name.

    Args:
        batch: verl's batch, after the trainer has computed its own log-probabilities, and before it learns.
    """
    rows = list(_rows(batch))
    fields = ["rollout_log_probs", "old_log_probs", "entropy", "response_mask"]
    data = tq.kv_batch_get(keys=[key for key, _ in rows], partition_id=batch.partition_id, select_fields=fields)
    columns = [[_values(row) for row in _each(data[name])] for name in fields]
    return {
        bytes.fromhex(tag["row"]): SeenTokens((trainer - engine)[mask > 0], entropy[mask > 0])
        for (_, tag), engine, trainer, entropy, mask in zip(rows, *columns, strict=True)
    }


def _rows(batch: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the rows of a batch, by key and tag, without padding rows."""
    return ((k, tag) for k, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False))


def ages(tags: Iterable[Mapping[str, Any]], version: int) -> list[int]:
    """Return for each row how many updates ago it was begun; padding rows and unknown versions are left out.

    Args:
        tags: of the rows.
        version: of the trainer's weights.
    """
    begun = [tag["min_global_steps"] for tag in tags if not tag.get("is_padding", False)]
    return [version - number for number in begun if number != UNKNOWN_VERSION]


def flat(column: Any) -> Any:
    """Return the values of a column, row after row, as one numpy array."""
    return np.concatenate([_values(row) for row in _each(column)])


def _each(column: Any) -> Sequence[Any]:
    rows: Sequence[Any] = column.unbind() if column.is_nested else list(column)
    return rows


def _values(row: Any) -> NDArray[np.float32]:
    values: NDArray[np.float32] = row.detach().float().cpu().numpy().reshape(-1)
    return values


def within(limit_s: float, action: Callable[[], T]) -> T:
    """Run an action that may hang, in a separate thread, and wait for at most `limit_s` seconds.

    Raises:
        WeightsError: it has not ended in time. The thread stays; the process is about to end.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again below, by who waits
            failure.append(error)

    thread = threading.Thread(target=run, name="lightning-weights", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise WeightsError(
            f"the weights did not reach vLLM within {limit_s:.0f} s. Did a replica run out of memory or end? Look into"
            " its"
            " log. Longer transfers need lightning.transfer_s in the table verl."
        )
    if failure:
        raise failure[0]
    return result[0]
