"""A teacher: a model loaded here, a model on a server, or the student itself. It has the student's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from lightning_spans.errors import ConfigError
from lightning_trainer.choices import SELF
from lightning_trainer.kits.teaching.options import read_self
from lightning_trainer.models import look
from lightning_trainer.policies import parse
from lightning_trainer.rl.algorithms.distil import DISTIL, at_endpoint, distil_rows

if TYPE_CHECKING:
    from lightning_trainer.backend_protocol import Learner
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.rl.rows import Row


class Teacher(Protocol):
    """Gives the log-probabilities of a student's samples."""

    def logprobs(self, rows: Sequence[Row]) -> Sequence[NDArray[Any]]:
        """Return for each row (K,) natural log-probabilities of its trained tokens.

        Raises:
            LightningError: the teacher gave none.
        """
        ...


class Tutor(Protocol):
    """Adds what is learned from a teacher to a step's rows."""

    def teach(self, batch: Batch, outcomes: Sequence[Outcome], traces: Traces) -> tuple[Batch, dict[str, float]]:
        """Call the teacher on a batch.

        Args:
            batch: of a step.
            outcomes: its rollouts.
            traces: reads the traces of attempts.

        Returns:
            The batch with advantages or targets, and metrics by name.

        Raises:
            LightningError: the teacher gave no result.
        """
        ...


class Distilling:
    """`Tutor` for sampled tokens.

    Args:
        teacher: gives their log-probabilities.
    """

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher

    def teach(self, batch: Batch, outcomes: Sequence[Outcome], traces: Traces) -> tuple[Batch, dict[str, float]]:  # noqa: ARG002 - tokens are all that it reads
        """Give each token the advantage of `distil_rows`: `Tutor.teach`."""
        rows, divergence = distil_rows(batch.rows, self._teacher.logprobs(batch.rows))
        return replace(batch, rows=rows), {"teacher_kl": divergence}


@contextmanager
def open_tutor(
    name: str,
    config: TrainConfig,
    learner: Learner,
    load: Callable[[str, Mapping[str, Any]], Learner],
    check: Callable[[], None] = lambda: None,
) -> Iterator[Tutor]:
    """Open the teacher that a configuration names.

    Args:
        name: of the teacher.
        config: of the run.
        learner: the student whose samples the teacher reads.
        load: loads a model.
        check: called during a wait for a server; raises to give up.

    Raises:
        ConfigError: the model does not exist, cannot be reached, has another vocabulary, or has adapters of other
            policies.
    """
    student = learner.engine
    if name == SELF:
        from lightning_trainer.kits.teaching.self_teacher import SelfTeacher

        alone = config.algorithm == DISTIL
        yield SelfTeacher(learner, read_self(config), alone=alone, failed=config.failed)
    elif at_endpoint(name):
        from lightning_trainer.kits.teaching.endpoint import EndpointTeacher

        with closing(EndpointTeacher(name, check)) as server:
            server.check(student.tokenizer, student.max_model_len)
            yield Distilling(server)
    else:
        look(name)  # raises if the model is not found
        with closing(load(name, {"device": config.device, "dtype": config.dtype})) as its:
            _check_adapters(name, [each.model for each in its.engines[1:]], _adapters_of(config) or {student.model})
            check_vocabulary(name, student.tokenizer.get_vocab(), its.engine.tokenizer.get_vocab())
            most, longest = its.engine.max_model_len, student.max_model_len
            if most < longest:
                raise ConfigError(
                    f"the teacher {name} reads {most} tokens, and the student writes up to {longest}. Set"
                    f" --max-model-len {most}."
                )
            yield Distilling(its)


def _adapters_of(config: TrainConfig) -> set[str]:
    """Return the names of the adapters that a run trains; empty if it trains one policy."""
    own = parse(config.policies)
    return {own.by_agent[agent] for agent in own.trained}


def _check_adapters(teacher: str, adapters: Sequence[str], trained: set[str]) -> None:
    """Check that a teacher of several adapters, each of which reads the rows of its name, has all that are needed.

    Raises:
        ConfigError: one is missing.
    """
    lacking = sorted(trained - {*adapters})
    if adapters and lacking:
        one = (look(teacher).folder or Path(teacher)) / adapters[0]
        raise ConfigError(
            f"the teacher {teacher} has the adapters {', '.join(adapters)}, and this run trains {', '.join(lacking)}."
            f" Name the folder of one adapter, such as {one}, or train policies of the same names."
        )


def check_vocabulary(teacher: str, student: Mapping[str, int], its: Mapping[str, int]) -> None:
    """Check that each token of a student has the same id in the teacher's vocabulary.

    Raises:
        ConfigError: a token does not.
    """
    other = [token for token, number in student.items() if its.get(token) != number]
    if other:
        first = min(other, key=student.__getitem__)
        now = its.get(first, "unknown")
        raise ConfigError(
            f"the teacher {teacher} has another vocabulary: {len(other)} of the student's {len(student)} "
            f"tokens have another id there or are missing, such as {first!r} ({student[first]}, there {now}). A teacher"
            " reads the"
            " student's tokens: give one of the same family, or learn from its answers with lightning-rl sft."
        )
