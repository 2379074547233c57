"""A small environment of verifiers from 0.4 on: sums, one answer each."""

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    """A sum and its answer."""

    answer: str


class SumsTask(vf.Task[SumsData]):
    """Scored by equality."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumsConfig(vf.TasksetConfig):
    """How many."""

    num_tasks: int = 6


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """Sums of two digits."""

    def load(self) -> list[SumsTask]:
        return [
            SumsTask(SumsData(prompt=f"{n} + {n + 1} = ?", answer=str(2 * n + 1)), self.config.task)
            for n in range(self.config.num_tasks)
        ]


__all__ = ["SumsTaskset"]
