"""A teacher: a model loaded here, or one behind a server. Either has the student's vocabulary, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from lightning_spans.errors import ConfigError
from lightning_trainer.models import look

if TYPE_CHECKING:
    from lightning_trainer.backends.protocol import Learner
    from lightning_trainer.config import TrainConfig
    from lightning_trainer.gateway.engine import Engine
    from lightning_trainer.rl.rows import Row


class Teacher(Protocol):
    """Says how likely it finds what a student sampled."""

    def logprobs(self, rows: Sequence[Row]) -> Sequence[NDArray[Any]]:
        """Return for each row (K,) natural log-probabilities of its trained tokens.

        Raises:
            LightningError: it gave none.
        """
        ...


@contextmanager
def teaching(
    config: TrainConfig, student: Engine, load: Callable[[str, Mapping[str, Any]], Learner]
) -> Iterator[Teacher | None]:
    """Open the teacher that a configuration names; None where it names none.

    Args:
        config: of the run.
        student: whose samples it is to read.
        load: loads a model.

    Raises:
        ConfigError: there is no such model, it can't be reached, or its vocabulary is another one.
    """
    if config.teacher is None:
        yield None
    elif "=" in config.teacher:
        from lightning_trainer.teaching.endpoint import Endpoint

        with closing(Endpoint(config.teacher)) as server:
            server.check(student.tokenizer)
            yield server
    else:
        look(config.teacher)  # or refuse
        with closing(load(config.teacher, {"device": config.device, "dtype": config.dtype})) as learner:
            check_vocabulary(config.teacher, student.tokenizer.get_vocab(), learner.engine.tokenizer.get_vocab())
            most, longest = learner.engine.max_model_len, student.max_model_len
            if most < longest:
                raise ConfigError(
                    f"the teacher {config.teacher} reads {most} tokens, and the student writes up to {longest}. Set"
                    f" --max-model-len {most}."
                )
            yield learner


def check_vocabulary(teacher: str, student: Mapping[str, int], its: Mapping[str, int]) -> None:
    """Make sure that each token of a student is the teacher's by the same number.

    Raises:
        ConfigError: one is not.
    """
    other = [token for token, number in student.items() if its.get(token) != number]
    if other:
        first = min(other, key=student.__getitem__)
        now = its.get(first, "unknown")
        raise ConfigError(
            f"the teacher {teacher} has another vocabulary: {len(other)} of the student's {len(student)} tokens are not"
            f" its own by the same number, such as {first!r} ({student[first]}, there {now}). A teacher reads the"
            " student's tokens: give one of the same family, or learn from its answers with lightning-rl sft."
        )
