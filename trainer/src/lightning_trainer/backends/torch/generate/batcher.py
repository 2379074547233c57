"""A generating thread: continuous batching over the slots of one cache.

Each step computes one token for every decoding request and some prompt tokens of new requests, all packed into one
forward pass.
"""

from __future__ import annotations

import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_trainer.backends.torch.generate.mixed import MixedLinears
from lightning_trainer.backends.torch.generate.request import Request
from lightning_trainer.backends.torch.generate.sampling import SampledTokens, draw
from lightning_trainer.backends.torch.model.cache import SlotCache
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.model.step import SHORT, Chunk, StepPlan
from lightning_trainer.gateway.engine import SampledPiece

_log = logging.getLogger(__name__)

_STEP_TOKENS = 512  # most prompt tokens in a step, so that decoding requests never wait long
_WORTH_WAITING = 16  # if another is computing at least so many shared tokens, a request waits for them


class Batcher:
    """The generating thread with its slots, its waiting requests and its cache."""

    def __init__(self, model: LoadedModel, slots: int, threads: int, mixed: MixedLinears | None = None) -> None:
        self._model, self._threads, self._mixed = model, threads, mixed
        self._cache = SlotCache(model.shape, slots, model.max_model_len)
        self._running: dict[int, Request] = {}  # by slot
        self.counts: Counter[str] = Counter()
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()  # guards the fields below, and _waiting
        self._held = 0
        self._held_since, self._held_s = 0.0, 0.0
        self._busy = False
        self._closed = False
        self._failure: Exception | None = None  # that ended the thread
        self._thread = threading.Thread(target=self._run, name="lightning-generate", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> int:
        """Number of running and waiting requests."""
        return len(self._running) + len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RuntimeError: the engine is closed, or its thread has failed.
        """
        with self._changed:
            self._check_thread()
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._waiting.append(request)
            self._changed.notify_all()

    def held_seconds(self) -> float:
        """Return for how long requests have been held back since the start: a clock that runs while they are."""
        with self._changed:
            return self._held_s + (time.monotonic() - self._held_since if self._held else 0.0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for running requests to end, start no others, and pause the thread until the end of the block.

        Raises:
            RuntimeError: the thread has failed.
        """
        with self._changed:
            if not self._held:
                self._held_since = time.monotonic()
            self._held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy and (not self._running or self._closed))
        try:
            self._check_thread()
            yield
        finally:
            with self._changed:
                self._held -= 1
                if not self._held:
                    self._held_s += time.monotonic() - self._held_since
                self._changed.notify_all()

    def forget(self) -> None:
        """Clear the prefix cache. Call it while the thread is held."""
        self._cache.clear()

    def close(self) -> None:
        """End the thread after its current step; unfinished requests get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has failed: {self._failure}") from self._failure

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._next():
                    self._try_step()
        except Exception as error:  # noqa: BLE001  callers get it
            _log.exception("the engine has failed")
            self._failure = error
        with self._changed:
            self._busy, self._closed = False, True
            left = [*self._running.values(), *self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
        self._fail(left, self._failure or RuntimeError("the engine was closed"))

    def _try_step(self) -> None:
        """Take a step; if it fails, fail the running requests, so that no caller waits for ever."""
        try:
            self._step()
        except Exception as error:  # noqa: BLE001  whatever it is, the next requests may succeed
            _log.exception("generation failed")
            self._fail(list(self._running.values()), error)
            self._cache.free()

    def _next(self) -> bool:
        """Whether to take a step, after waiting for one; False if the engine is closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._running or (self._waiting and not self._held))
            self._busy = True
            return not self._closed

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            self._running.pop(request.slot, None)
        _deliver([(request, error) for request in requests])

    # One step.

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        if not self._running:
            return
        self._compact()
        plan = StepPlan(self._cache, self._divide())
        if self._mixed is not None:
            self._mixed.choose(plan.owners)
        hidden = self._model.hidden(plan.tokens, plan.positions, plan)
        plan.finish()
        ready, rows, end = [], [], 0
        for chunk in plan.chunks:
            end += chunk.length
            if self._cache.computed[chunk.slot] == self._cache.planned[chunk.slot]:
                ready.append(self._running[chunk.slot])
                rows.append(end - 1)
        if ready:
            logits = self._model.head(hidden if len(rows) == len(hidden) else hidden[rows])
            self._take(ready, draw(logits, [request.next_draw() for request in ready]))

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._running.values() if request.cancelled]:
            self._release(request)
        with self._changed:
            if any(request.cancelled for request in self._waiting):
                self._waiting = deque(request for request in self._waiting if not request.cancelled)

    def _release(self, request: Request) -> None:
        del self._running[request.slot]
        self._cache.end(request.slot)

    def _admit(self) -> None:
        """Assign free slots to waiting requests, in order.

        A request may wait for a prefix that another is computing.
        """
        with self._changed:
            if self._held:
                return
            kept: deque[Request] = deque()
            try:
                while self._waiting and len(self._running) < self._cache.slots:
                    request = self._waiting.popleft()
                    try:
                        placed = self._place(request)
                    except Exception as error:
                        _deliver([(request, error)])  # it is in no slot yet, so nothing else would report the error
                        raise
                    if not placed:
                        kept.append(request)
            finally:
                self._waiting.extendleft(reversed(kept))

    def _place(self, request: Request) -> bool:
        """Whether a request was put into a slot; False if it should wait."""
        # the last token is always computed, because it gives the logits
        cache, last = self._cache, len(request.prompt) - 1
        same = np.minimum(cache.shared(request.prompt, request.adapter), last)
        there = cache.there(same)
        source = int(there.argmax())
        shared = int(there[source])
        if int(cache.coming(same).max()) - shared >= _WORTH_WAITING:
            return False
        continues = source not in self._running and shared >= cache.computed[source] - 1
        slot = source if continues and shared else self._free_slot()
        cache.begin(slot, request.prompt, source, shared, request.adapter)
        request.slot, request.version = slot, request.newest()
        self._running[slot] = request
        self.counts.update(requests=1, prompt_tokens=len(request.prompt), reused_tokens=shared)
        return True

    def _free_slot(self) -> int:
        """Return an empty slot, the lowest of several; otherwise the one that has been idle for longest."""
        free = [slot for slot in range(self._cache.slots) if slot not in self._running]
        return min(free, key=lambda slot: (self._cache.ended[slot], slot))

    def _compact(self) -> None:
        """Move requests down into free slots, so that neighbouring slots can share their matrix products."""
        while (top := max(self._running)) >= len(self._running):
            hole = next(slot for slot in range(top) if slot not in self._running)
            self._cache.swap(top, hole)
            request = self._running.pop(top)
            request.slot = hole
            self._running[hole] = request

    def _divide(self) -> list[Chunk]:
        """Return the chunks of this step: a token of each decoding request, and prompts first come, first served."""
        cache, chunks, left = self._cache, [], _STEP_TOKENS
        for slot, request in self._running.items():
            missing = int(cache.planned[slot] - cache.computed[slot])
            if cache.memories is not None and missing > 1:
                missing -= 1  # the last one goes alone: others with this prompt continue from the memory before it
            if request.drawn:
                chunks.append(Chunk(slot, missing))
            elif left >= min(missing, SHORT):
                chunks.append(Chunk(slot, min(missing, left)))
                left -= chunks[-1].length
        return chunks

    def _take(self, requests: list[Request], drawn: SampledTokens) -> None:
        """Pass sampled tokens to their requests, and end those that are done."""
        pieces: list[tuple[Request, SampledPiece | Exception]] = []
        try:
            for request, token, logprob, steered in zip(requests, *drawn, strict=True):
                piece = request.take(token, logprob, ends=token in self._model.end_tokens, steered=steered)
                pieces.append((request, piece))
                self.counts["generated_tokens"] += 1
                if piece.finish_reason is None:
                    self._cache.append(request.slot, token)
                else:
                    self._release(request)
        finally:  # an error reaches only running requests, not those that have just ended
            _deliver(pieces)


def _deliver(pieces: list[tuple[Request, SampledPiece | Exception]]) -> None:
    """Pass pieces to the event loops that wait for them, one wake-up per loop."""
    by_loop: dict[AbstractEventLoop, list[tuple[Request, SampledPiece | Exception]]] = {}
    for request, piece in pieces:
        by_loop.setdefault(request.loop, []).append((request, piece))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, batch)
        except RuntimeError:  # the loop is closed: nothing waits any more
            for request, _ in batch:
                request.cancelled = True


def _put(batch: list[tuple[Request, SampledPiece | Exception]]) -> None:
    for request, piece in batch:
        request.pieces.put_nowait(piece)
