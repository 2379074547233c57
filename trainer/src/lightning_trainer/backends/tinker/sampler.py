"""The policies of a Tinker server as engines of the gateway.

The API has no streaming: an answer arrives as a whole. A request has either stop strings or stop tokens; it sends the
tokens that end an answer, and a stop string cuts the answer here. The result is the same as if the server had stopped
there, but the tokens after it are paid for.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from lightning_trainer.backends.tinker.bill import Bill, BudgetSpentError, TokenCount
from lightning_trainer.backends.tinker.errors import TinkerError
from lightning_trainer.backends.tinker.service import Service, sdk
from lightning_trainer.engines.gate import Gate
from lightning_trainer.gateway.engine import SampledPiece, Sampling, mark_ended
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.text_stream import TextStream


class TinkerEngine:
    """A policy on the server: `Engine`. An answer ends on the weights that it began with.

    Args:
        name: of the policy.
        held: tokenizer, longest context, tokens that end an answer, and the format of tool calls.
        service: the server that samples it.
        bill: counts what is sampled.
        gate: shut while the weights that it samples from change.
        seed: of sampling without its own seed.
    """

    abilities: frozenset[str] = frozenset()
    waits_for_updates = False  # whether answers are held back during an update

    def __init__(
        self, name: str, held: Mapping[str, Any], service: Service, bill: Bill, *, gate: Gate, seed: int
    ) -> None:
        self.model = name
        self.tokenizer = held["tokenizer"]
        self.max_model_len: int = held["max_model_len"]
        self.tool_format = held["tool_format"]
        self._ends: frozenset[int] = held["end_tokens"]
        self._service, self._bill, self._gate = service, bill, gate
        self._weights: tuple[Any, int] = (None, 0)  # the SDK's client, and the version of its weights
        self.random = random.Random(f"{seed}/{name}")

    @property
    def version(self) -> int:
        """Version of the newest weights."""
        return self._weights[1]

    @property
    def client(self) -> Any:
        """The SDK's client of the newest weights."""
        return self._weights[0]

    def publish(self, sampler: Any, version: int) -> None:
        """Sample later answers from other weights."""
        self._weights = (sampler, version)

    def check(self) -> None:
        """Raise the error that ended the server for good.

        Raises:
            TinkerError: it is down.
            BudgetSpentError: no money is left.
        """
        self._service.check_lost()
        self._bill.check()

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        """Sample one answer: `Engine.generate`.

        Raises:
            ValueError: the prompt is empty or leaves no room in the context.
            Refusal: the server failed.
        """
        room = self.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_model_len}")
        most = min(room, sampling.max_tokens or room)
        seed = self.random.getrandbits(31) if sampling.seed is None else sampling.seed % 2**31
        try:
            async with self._bill.reserved(TokenCount(prompt=len(prompt), sampled=most)), self._gate.passed():
                client, version = self._weights
                tokens, logprobs, cached = await self._sample(client, prompt, sampling, most, seed)
                self._bill.add(TokenCount(prompt=len(prompt), cached=cached, sampled=len(tokens)))
        except (TinkerError, BudgetSpentError) as error:
            if isinstance(error, TinkerError) and not error.refused:
                mark_ended(0.0)  # whatever the program makes of it says nothing about the policy
            raise Refusal(502, str(error), "server_error", "upstream_failed") from error
        yield self._answer(tokens, logprobs, sampling, version)

    async def _sample(
        self, client: Any, prompt: Sequence[int], sampling: Sampling, most: int, seed: int
    ) -> tuple[list[int], list[float], int]:
        types = sdk().types
        params = types.SamplingParams(
            max_tokens=most, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k or -1,
            seed=seed, stop=sorted(self._ends),
        )  # fmt: skip
        asked = client.sample(prompt=types.ModelInput.from_ints(list(prompt)), num_samples=1, sampling_params=params)
        told = await self._service.arrive(asked, f"sample from {self.model}")
        try:
            (sequence,) = told.sequences
            tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        except (TypeError, ValueError, AttributeError) as error:
            raise self._nonsense(f"no answer ({error})") from error
        if len(logprobs) != len(tokens) or not 0 < len(tokens) <= most or not all(map(math.isfinite, logprobs)):
            raise self._nonsense(f"{len(tokens)} tokens of at most {most} with {len(logprobs)} log-probabilities")
        return tokens, logprobs, int(getattr(told, "prompt_cache_hit_tokens", 0) or 0)

    def _answer(self, tokens: list[int], logprobs: list[float], sampling: Sampling, version: int) -> SampledPiece:
        """Return the tokens up to the end of the answer, with their text."""
        stream, text, ended = TextStream(self.tokenizer, sampling.stop), "", False
        count = 0
        for token in tokens:
            count += 1
            ended = token in self._ends
            if not ended:
                new, ended = stream.push(token)
                text += new
            if ended:
                break
        stopped_by_text = ended and tokens[count - 1] not in self._ends
        text += "" if stopped_by_text else stream.finish()
        reason = "stop" if ended else "length"
        return SampledPiece(tuple(tokens[:count]), tuple(logprobs[:count]), text, reason, version=version)  # type: ignore[arg-type]

    def _nonsense(self, what: str) -> TinkerError:
        return TinkerError(f"the Tinker server {self._service.url} sent {what}.")
