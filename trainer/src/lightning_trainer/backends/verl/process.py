"""verl's trainer, started through Ray and watched until it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from lightning_spans.errors import LightningError
from lightning_trainer.backends.verl.options.describe import compose_options
from lightning_trainer.backends.verl.options.overrides import Site, overrides
from lightning_trainer.backends.verl.options.packing import has_flash_attention
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models.shape import read_shape

_LOOK_S: Final = 0.5
_END_S: Final = 60.0
_START_S: Final = 600.0  # to import verl and to reach Ray, whose own connecting has no bound
# Messages of torch and vLLM about a full GPU.
_FULL: Final = ("out of memory", "No available memory for the cache blocks", "Free memory on device")
_NO_ROOM: Final = (
    "a GPU has too little memory; --dry-run estimates what each needs. Learning takes less with a smaller"
    " max_model_len, with lora_rank, and with param_offload and optimizer_offload of"
    " actor_rollout_ref.actor.fsdp_config in the table verl; sampling, with another"
    " actor_rollout_ref.rollout.gpu_memory_utilization there."
)


def run_verl(config: TrainConfig, site: Site, check: Callable[[], None]) -> None:
    """Run verl's trainer to its end.

    Args:
        config: of the run.
        site: its location.
        check: called repeatedly; raises to give up.

    Raises:
        LightningError: verl failed, one of its processes died, or Ray did not answer.
        Exception: the error that `check` raised.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers are the run, so they need no lower priority
    import ray

    values = overrides(config, site, read_shape(config.model), flash_attention=has_flash_attention())
    verls = compose_options(values)
    failure: list[BaseException] = []
    started = _ActorStarter()

    def work() -> None:
        try:
            from verl.trainer.main_ppo import run_ppo
            from verl.trainer.ppo.utils import need_critic, need_reference_policy
            from verl.utils.config import validate_config

            validate_config(
                config=verls, use_reference_policy=need_reference_policy(verls), use_critic=need_critic(verls)
            )
            run_ppo(verls, task_runner_class=started)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the main thread
            failure.append(error)

    thread = threading.Thread(target=work, name="lightning-verl", daemon=True)
    thread.start()
    latest = time.monotonic() + _START_S
    try:
        while thread.is_alive():
            thread.join(_LOOK_S)
            check()
            if not started.begun and time.monotonic() > latest:
                where = os.environ.get("RAY_ADDRESS", "this machine")
                raise LightningError(
                    f"Ray on {where} did not answer within {_START_S:.0f} s. See whether `ray status` answers there;"
                    " the logs of Ray's daemon, raylet.out, are under /tmp/ray/session_latest/logs."
                )
    except BaseException:
        started.kill()  # shutting Ray down while a thread waits for it would crash this process
        thread.join(_END_S)
        raise
    finally:
        if not thread.is_alive():
            ray.shutdown()
    if failure:
        raise explain_error(failure[0]) from failure[0]


class _ActorStarter:
    """Replaces the actor class that verl's `run_ppo` starts, and keeps the actor."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._killed = False

    def remote(self) -> Any:
        """Start the actor."""
        from lightning_trainer.backends.verl.task_runner import TaskRunner

        if self._killed:
            raise LightningError("the run was stopped before verl had started")
        self._actor = TaskRunner.remote()
        return self._actor

    @property
    def begun(self) -> bool:
        """Whether Ray was reached."""
        return self._actor is not None

    def kill(self) -> None:
        """Kill the actor, and everything that it started."""
        import ray

        self._killed = True
        if self._actor is not None:
            ray.kill(self._actor)


def explain_error(error: BaseException) -> BaseException:
    """Return an error that a user can read: ours as raised in verl's process, or one about a process that died."""
    from ray.exceptions import RayActorError, RayTaskError

    inner: BaseException | None = error
    while isinstance(inner, RayTaskError):
        inner = inner.cause if isinstance(inner.cause, BaseException) else None
    if isinstance(inner, LightningError):
        return inner
    if isinstance(inner, RayActorError):
        return LightningError(f"a process of verl died: {str(inner)[:2000]}")
    told = f"verl failed: {str(error)[-4000:]}"
    return LightningError(f"{_NO_ROOM}\n{told}" if any(words in str(error) for words in _FULL) else told)
