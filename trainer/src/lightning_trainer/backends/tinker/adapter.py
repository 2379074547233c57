"""An adapter on the server: its log-probabilities, its gradient, its steps, its weights.

Axes: T tokens of a sequence, `_N` = T - 1 predicted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.service import Service, sdk, tensor

Averages: TypeAlias = Literal["nothing", "sequences of a request", "sequences of a step"]
Floats: TypeAlias = NDArray[np.float32]
_FARTHEST = 1e-3  # nats by which rounding may raise a log-probability above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a server scales a gradient.

    Attributes:
        tokens: whether it divides by the predicted tokens of each sequence.
        sequences: over which sequences it takes the mean.
    """

    tokens: bool = False
    sequences: Averages = "nothing"

    def factor(self, predicted: int, sequences: int) -> float:
        """Return the factor that undoes the division for a sequence.

        Args:
            predicted: number of its predicted tokens.
            sequences: number of sequences in the optimiser step.
        """
        return (predicted if self.tokens else 1.0) * (sequences if self.sequences == "sequences of a step" else 1.0)


class Adapter:
    """An adapter on the server.

    Args:
        service: the server.
        client: the SDK's.
    """

    def __init__(self, service: Service, client: Any) -> None:
        self.service, self.client = service, client
        self.tokens_read = 0  # by forward passes
        self.tokens_trained = 0
        self.seconds = 0.0  # that the server spent on these

    @property
    def model_id(self) -> str:
        """The server's name of the adapter."""
        return str(self.client.model_id)

    def logprobs(
        self, sequences: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]] | None = None
    ) -> list[Floats]:
        """Return for each sequence (N,) natural log-probabilities at temperature 1.

        Args:
            sequences: each (T,) token ids.
            targets: for each (N,) tokens to predict instead of the sequence's own.
        """
        if not sequences:
            return []
        asked = targets if targets is not None else [tokens[1:] for tokens in sequences]
        data = [
            self.datum(tokens, target, weights=np.ones(len(target), np.float32))
            for tokens, target in zip(sequences, asked, strict=True)
        ]
        self.tokens_read += sum(len(target) for target in asked)
        began = time.monotonic()
        told = self.service.wait(self.client.forward(data, "cross_entropy"), f"read {len(data)} sequences")
        self.seconds += time.monotonic() - began
        return self._read(told, [len(target) for target in asked])

    def gradient(
        self,
        sequences: Sequence[NDArray[Any]],
        targets: Sequence[NDArray[Any]],
        now: Sequence[Floats],
        advantages: Sequence[Floats],
        scaling: Scaling,
        *,
        total: int | None = None,
    ) -> None:
        """Add the gradient of minus the sum of advantage times log-probability, however the server averages.

        Args:
            sequences: each (T,) token ids.
            targets: for each (N,) tokens with the log-probabilities to move.
            now: for each (N,) their log-probabilities, so that the importance ratio is 1.
            advantages: for each (N,) how far they move.
            scaling: of the server.
            total: number of sequences in the optimiser step; None: these.
        """
        count = total or len(sequences)
        data = [
            self.datum(tokens, target, logprobs=its, advantages=own * np.float32(scaling.factor(len(target), count)))
            for tokens, target, its, own in zip(sequences, targets, now, advantages, strict=True)
        ]
        self.tokens_trained += sum(len(target) for target in targets)
        apart = [[datum] for datum in data] if scaling.sequences == "sequences of a request" else [data]
        began = time.monotonic()
        futures = [self.client.forward_backward(part, "importance_sampling") for part in apart if part]
        for future in futures:
            self.service.wait(future, f"learn from {len(data)} sequences")
        self.seconds += time.monotonic() - began

    def step(self, **params: float) -> float | None:
        """Take an optimiser step; return the gradient norm before clipping if the server reports it."""
        adam = sdk().types.AdamParams(**params)
        told = self.service.wait(self.client.optim_step(adam), "take an optimiser step")
        norms = [float(value) for name, value in (told.metrics or {}).items() if name.endswith("grad_norm")]
        return norms[0] if norms else None

    def sampler(self) -> Any:
        """Return the SDK's client that samples from the current weights."""
        return self.service.call(lambda _: self.client.save_weights_and_get_sampling_client(), "publish new weights")

    def save(self, name: str) -> str:
        """Save weights and optimiser on the server, and return the path."""
        return str(self.service.wait(self.client.save_state(name), "save weights and optimiser").path)

    def load(self, path: str) -> None:
        """Replace the adapter by one with the weights and the optimiser of a path on the server.

        A used adapter cannot load: SkyRL allows loading only as the first operation.
        """
        self.service.unload(self.model_id)
        self.client = self.service.restored(path)

    def archive(self, name: str) -> bytes:
        """Save the weights for samplers on the server, and download them."""
        saved = self.service.wait(self.client.save_weights_for_sampler(name), "save weights for sampling")
        return self.service.archive(str(saved.path))

    def datum(self, tokens: NDArray[Any], target: NDArray[Any], **numbers: Floats) -> Any:
        """Return a sequence with its predicted tokens and their numbers, in the SDK's format."""
        types = sdk().types
        inputs = {"target_tokens": tensor([int(token) for token in target], "int64")}
        inputs |= {name: tensor([float(value) for value in values], "float32") for name, values in numbers.items()}
        ids = [int(token) for token in tokens[:-1]]
        return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)

    def _read(self, told: Any, lengths: Sequence[int]) -> list[Floats]:
        """Read log-probabilities, and reject values that cannot be log-probabilities.

        Raises:
            TinkerError: the server sent something else.
        """
        try:
            found = [np.asarray(each["logprobs"].data, np.float32) for each in told.loss_fn_outputs]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._nonsense(f"no log-probabilities ({type(error).__name__}: {error})") from error
        if [len(each) for each in found] != list(lengths):
            raise self._nonsense(f"{[len(each) for each in found]} log-probabilities for {list(lengths)} tokens")
        for each in found:
            if not np.isfinite(each).all() or (each > _FARTHEST).any():
                raise self._nonsense("log-probabilities that are not finite, or above 0")
        return found

    def _nonsense(self, what: str) -> TinkerError:
        return TinkerError(
            f"the Tinker server {self.service.url} sent {what}. No update was made from it; continue from the last"
            " checkpoint with --resume, and look at the server's log."
        )


def prompt_logprobs(service: Service, sampler: Any, tokens: NDArray[Any]) -> Floats:
    """Return (N,) log-probabilities of all tokens but the first under a sampler's weights, at temperature 1.

    Raises:
        TinkerError: the server fails, or sent something else.
    """
    prompt = sdk().types.ModelInput.from_ints([int(token) for token in tokens])
    told = service.wait(sampler.compute_logprobs(prompt), f"read {len(tokens)} tokens")
    wanted = len(tokens) - 1
    # some servers begin with the first token
    values = [np.nan if each is None else float(each) for each in told][-wanted:]
    found = np.asarray(values, np.float32)
    if len(found) != wanted or not np.isfinite(found).all():
        raise TinkerError(
            f"the Tinker server {service.url} sent {len(told)} log-probabilities for a prompt of {len(tokens)} tokens,"
            " or some that are not finite."
        )
    return found
