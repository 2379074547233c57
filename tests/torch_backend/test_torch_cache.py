"""The cache of keys and values: how much room prompts that share their beginning take."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_trainer.backends.torch.model.cache import CacheShape, SlotCache

pytestmark = pytest.mark.torch


def test_a_prompt_that_leaves_a_long_one_early_takes_no_room_in_every_slot() -> None:
    cache = SlotCache(CacheShape(1, 1, 2, torch.float32, torch.device("cpu")), 8, 8192)
    first = np.arange(3000, dtype=np.int32)
    values = torch.arange(3000.0).repeat(1, 1, 2, 1).transpose(2, 3).contiguous()
    cache.begin(0, first, 0, 0)
    cache.extend_prefix(0, values, -values)
    room = cache.room
    second = first.copy()
    second[100:] += 10_000  # the same instructions, another document
    shared = int(cache.shared(second)[0])
    assert shared == 100
    cache.begin(1, second, 0, shared)
    assert (cache.room, cache.start(0), cache.start(1)) == (room, 3000, 100)
    assert torch.equal(cache.prefixes[1].keys, values[:, :, :100])
    assert torch.equal(cache.prefixes[1].values, -values[:, :, :100])
    assert torch.equal(cache.prefixes[0].keys, values)
