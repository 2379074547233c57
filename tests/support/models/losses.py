"""Updates whose losses are recorded."""

from __future__ import annotations

from lightning_trainer.backends.torch.backend import learner_options
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.rl.rows import Row
from support.models.updates import make_row

PROMPT, GOOD, BAD = list(range(10, 30)), [40, 41, 42, 43], [50, 51, 52, 53]


def options_of(algorithm: str, **more: object) -> dict[str, object]:
    """What a run hands to the backend."""
    config = TrainConfig(target="a:b", data="x.jsonl", model="m", algorithm=algorithm, **more)  # type: ignore[arg-type]
    return learner_options(config)


def recorded(backend, tokens: list[int], advantage: float) -> Row:
    """A row as sampled now."""
    from lightning_trainer.backends.torch.learn.tree import micro_batches
    from lightning_trainer.backends.torch.learn.update import token_logprobs as forward

    row = make_row(PROMPT + tokens, slice(20, 24), advantage)
    (packed,) = micro_batches([row], 100)
    row.logprobs[20:24] = forward(backend._model, packed)[0].numpy()
    return row
