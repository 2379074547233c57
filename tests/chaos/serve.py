"""The server that chaos kills: a store, the gateway over an engine whose answers follow from prompt and seed alone."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_spans.store import open_store
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.engine import SampledPiece, Sampling
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.settings import Routing
from support.fakes import FakeEngine


class SeededEngine(FakeEngine):
    """Draws the same answer for the same prompt and seed, in whatever process."""

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        drawn = hashlib.sha256(f"{tuple(prompt)} {sampling.seed}".encode()).hexdigest()
        ids, text, finish = self._cut(f"answer {drawn[:6]}", sampling)
        for piece in self._pieces(ids, text, finish):
            await asyncio.sleep(0)
            yield piece


def main(store: str, secret: Path, port: int) -> None:
    kept = open_store(store)
    routing = Routing(agents=("*",), unnamed="writer", seed=7)
    app = create_app(kept, keys=Keys.from_file(secret), engine=SeededEngine(), routing=routing)
    ServerThread(app, port=port).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
