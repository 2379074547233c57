"""verl's own trainer on the rows of a run that is over: its `agent_loop_manager_class` reads them from the run's store.

    python tests/gpu/replay.py RUN LOG

writes verl's own metrics, a line a step, to LOG. Estimator, trainer and sampler are verl's; what stays ours is the data
set, which is outside the step, and on a CPU what verl can't do without.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

GROUP = re.compile(r":t(\d+)-(\d+)$")  # step and place of a group of training rollouts
RUN = "LIGHTNING_REPLAY_RUN"


def config_of(run: Path) -> Any:
    from lightning_trainer import TrainConfig

    return TrainConfig(**json.loads((run / "config.json").read_text()))


class Replay:
    """Return the rows of a run again, step by step, at once."""

    def __init__(self, run: Path) -> None:
        from lightning_spans import hooks
        from lightning_spans.store import open_store
        from lightning_spans.store.traces import traces_of
        from lightning_trainer.backends.verl.steps.collect import make_batch
        from lightning_trainer.rl.rollouts import outcomes
        from lightning_trainer.rl.scores import total

        hooks.load_all()
        self._config = config_of(run)
        groups = defaultdict(list)
        store = open_store(str(run / "lightning.db"))
        try:
            for rollout in store.rollouts():
                if place := GROUP.search(rollout.group_id):
                    groups[int(place[1]), int(place[2])].append(rollout)
            self._groups = {}
            for place, members in groups.items():
                ended = outcomes(store, sorted(members, key=lambda rollout: rollout.rollout_id))
                batch = make_batch(self._config, ended, lambda ids: traces_of(store, attempt_ids=ids))
                rows = defaultdict(list)
                for row in batch.rows:
                    rows[row.rollout_id].append(row)
                laid = [rows[outcome.rollout.rollout_id] for outcome in ended]
                self._groups[place] = laid, [total(outcome.rewards) for outcome in ended]
        finally:
            store.close()

    @classmethod
    def create(cls, **_: Any) -> Replay:
        return cls(Path(os.environ[RUN]))

    def generate_sequences(self, prompts: Any) -> None:
        import transfer_queue as tq

        from lightning_trainer.backends.verl.steps.collect import PARTITION, as_dicts, write
        from lightning_trainer.backends.verl.steps.trajectories import VerlPrompt, trajectories
        from lightning_trainer.lineage.manifest import StepSources

        for row in as_dicts(prompts):
            prompt = VerlPrompt(uid=str(row["uid"]), step=int(row["global_steps"]))
            rows, rewards = self._groups[divmod(int(row["index"]), self._config.batch_size)]
            tq.kv_put(key=prompt.uid, partition_id=PARTITION, tag={"status": "running"})
            laid = trajectories(prompt, rows, rewards, StepSources())
            write(prompt, [replace(one, fields={**one.fields, "uid": prompt.uid}) for one in laid])


def main(run: Path, log: Path) -> None:
    from lightning_trainer.backends.verl.options.describe import compose_options, count_steps
    from lightning_trainer.backends.verl.options.overrides import Site, overrides
    from lightning_trainer.backends.verl.options.packing import has_flash_attention
    from lightning_trainer.models.shape import read_shape

    config = config_of(run)
    os.environ |= {RUN: str(run), "VERL_FILE_LOGGER_PATH": str(log), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_worker_niceness": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    if config.device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    site = Site(folder=run.with_name("replayed"), steps=count_steps(config))
    values = overrides(config, site, read_shape(config.model), flash_attention=has_flash_attention())
    values |= {
        "algorithm.adv_estimator": "grpo",
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler.path": None,
        "trainer.v1.sampler.custom_sampler.name": None,
        "trainer.checkpoint_callback_class": None,
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "replay.Replay",
        "trainer.logger": ["console", "file"],
        "trainer.save_freq": -1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
    }
    from verl.trainer.main_ppo import run_ppo

    from lightning_trainer.backends.verl.task_runner import TaskRunner

    run_ppo(compose_options(values), task_runner_class=TaskRunner)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
