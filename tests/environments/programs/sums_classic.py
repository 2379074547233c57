"""A small environment of verifiers before 0.4: a sum, then whether the model is sure, in two turns."""

import verifiers as vf
from datasets import Dataset


class Sums(vf.MultiTurnEnv):
    """Asks once more after the first answer."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Sure? Answer again."}]


def load_environment(num_tasks: int = 6) -> vf.Environment:
    def rows(first, count):
        return Dataset.from_list(
            [{"question": f"{n} + {n + 1} = ?", "answer": str(2 * n + 1)} for n in range(first, first + count)]
        )

    async def right(completion, answer, **kwargs) -> float:
        return float(completion[-1].content.strip() == answer)

    return Sums(dataset=rows(0, num_tasks), eval_dataset=rows(100, 3), rubric=vf.Rubric(funcs=[right]), max_turns=2)
