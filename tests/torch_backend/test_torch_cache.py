"""The cache of keys and values: which blocks sequences share, what they hold, and what attends to them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

from lightning_trainer.backends.torch.model.attention import AttentionLayer
from lightning_trainer.backends.torch.model.cache import BLOCK, CacheShape, SlotCache
from lightning_trainer.backends.torch.model.paged import PagedAttention

pytestmark = pytest.mark.torch

KEY_HEADS, HEADS, WIDTH = 2, 6, 4
SHAPE = CacheShape(1, KEY_HEADS, WIDTH, torch.float32, torch.device("cpu"))


def number(token: int, position: int) -> float:
    """What the tests store as key and value of a token."""
    return float(np.sin(token * 1000 + position))


def compute(cache: SlotCache, slot: int) -> None:
    """Store keys and values of what is planned, as a step does."""
    for position in range(int(cache.computed[slot]), int(cache.planned[slot])):
        block, place = cache.blocks[slot, position // BLOCK], position % BLOCK
        stored = number(int(cache.tokens[slot, position]), position)
        heads = torch.arange(1.0, KEY_HEADS * WIDTH + 1).view(KEY_HEADS, WIDTH)
        cache.keys[0, block, :, place] = (heads * stored).sin()
        cache.values[0, block, :, :, place] = heads * stored
    cache.computed[slot] = cache.planned[slot]


def admit(cache: SlotCache, slot: int, prompt: list[int]) -> None:
    """Begin a prompt in a slot as the batcher does, from what is longest shared, and compute it."""
    ids = np.array(prompt, np.int32)
    there = cache.there(np.minimum(cache.shared(ids), len(ids) - 1))
    source = int(there.argmax())
    cache.begin(slot, ids, source, int(there[source]))
    compute(cache, slot)


def stored_values(cache: SlotCache, slot: int) -> list[float]:
    values = cache.values[0, cache.blocks[slot], 0, 0].reshape(-1)
    return values[: int(cache.computed[slot])].tolist()


SEQUENCES = st.tuples(st.integers(0, 2), st.sampled_from([1, 30, 64, 100, 128, 200]), st.integers(1, 90))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), SEQUENCES, st.integers(0, 70)), min_size=1, max_size=14))
def test_slots_hold_their_own_sequence_whatever_they_share(steps: list[tuple[int, tuple[int, int, int], int]]) -> None:
    """Prompts begin alike, up to some token, and answers go on from them; blocks that nobody holds are used again."""
    cache = SlotCache(SHAPE, 4, 512)
    for slot, (kind, common, own), answer in steps:
        admit(cache, slot, [5 + kind] * common + [20 + slot] * own)
        for n in range(answer):
            cache.append(slot, 40 + n)
            compute(cache, slot)
        cache.append(slot, 99)  # sampled, and never computed
        cache.end(slot)
        cache.swap(slot, (slot + 1) % 4)
    for slot in range(4):
        tokens = cache.tokens[slot, : cache.computed[slot]].tolist()
        expected = [number(token, position) for position, token in enumerate(tokens)]
        assert stored_values(cache, slot) == pytest.approx(expected)
    held = {int(block) for slot in range(4) for block in cache.blocks[slot, : -(-cache.computed[slot] // BLOCK)]}
    assert cache.blocks_in_use == len(held)


def test_prompts_share_full_blocks_and_copy_at_most_one() -> None:
    cache = SlotCache(SHAPE, 8, 8192)
    admit(cache, 0, [7] * 3000)
    first = cache.blocks_in_use
    admit(cache, 1, [7] * 100 + [8] * 20)
    assert cache.blocks_in_use == first + 1
    assert cache.blocks[1, 0] == cache.blocks[0, 0]
    admit(cache, 2, [7] * 3000)
    assert cache.blocks_in_use == first + 2


def test_memory_that_one_long_sequence_needed_is_freed_when_it_is_forgotten() -> None:
    cache = SlotCache(SHAPE, 2, 8192)
    admit(cache, 0, [7] * 8000)
    cache.clear()
    admit(cache, 0, [7] * 100)
    cache.clear()
    assert cache.keys.shape[1] == 2


@pytest.mark.parametrize("told", ["by the system", "by torch"])
def test_idle_sequences_make_room_if_memory_is_short_and_the_oldest_goes_first(monkeypatch, told: str) -> None:
    room, zeros = 40, torch.zeros

    def limited_zeros(size: tuple[int, ...], **how: object) -> torch.Tensor:
        if size[1] > room and size[-1] == BLOCK:  # keys still fit, and values do not
            raise torch.OutOfMemoryError("out of memory")
        return zeros(size, **how)

    if told == "by torch":
        monkeypatch.setattr(torch, "zeros", limited_zeros)
    else:
        available = room * 2 * BLOCK * KEY_HEADS * WIDTH * 4
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    cache = SlotCache(SHAPE, 8, 1024)
    admit(cache, 0, [9] * 600)  # it keeps running
    for slot in range(1, 8):
        admit(cache, slot, [20 + slot] * 600)
        cache.end(slot)
    assert cache.keys.shape[1] <= room
    assert cache.values.shape[1] <= room
    kept = [slot for slot in range(8) if cache.computed[slot]]
    assert kept[0] == 0
    assert kept[1:] == list(range(8 - len(kept) + 1, 8))
    assert len(kept) > 2
    for slot in kept:
        assert stored_values(cache, slot) == pytest.approx(
            [number(9 if not slot else 20 + slot, n) for n in range(600)]
        )


def test_running_sequences_take_more_memory_than_the_system_says_is_free(monkeypatch) -> None:
    """A process may swap or be given more: only what idle sequences hold is not worth it."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    cache = SlotCache(SHAPE, 8, 1024)
    for slot in range(8):
        admit(cache, slot, [20 + slot] * 600)
    assert all(cache.computed == 600)


def decode(cache: SlotCache, slots: list[int], layer: AttentionLayer, query_THD: torch.Tensor) -> torch.Tensor:
    """Attend from the last token of each slot."""
    plan = PagedAttention(cache, np.array(slots), cache.computed[slots] - 1)
    return plan.attend(layer, query_THD, cache.keys[0], cache.values[0])


def plain_attention(cache: SlotCache, slot: int, layer: AttentionLayer, query_HD: torch.Tensor) -> torch.Tensor:
    """Attend from the last token of one slot by the formula."""
    length = int(cache.computed[slot])
    seen = slice(0 if layer.window is None else max(0, length - layer.window), length)
    keys = cache.keys[0, cache.blocks[slot]].transpose(0, 1).reshape(KEY_HEADS, -1, WIDTH)[:, seen]
    values = cache.values[0, cache.blocks[slot]].permute(1, 0, 3, 2).reshape(KEY_HEADS, -1, WIDTH)[:, seen]
    shares = HEADS // KEY_HEADS
    scores = (query_HD[:, None] * keys.repeat_interleave(shares, 0)).sum(-1) * layer.scale
    if layer.cap is not None:
        scores = torch.tanh(scores / layer.cap) * layer.cap
    if layer.sinks_H is not None:
        scores = torch.cat([scores, layer.sinks_H[:, None]], 1)
    weights = scores.softmax(-1)[:, : keys.shape[1]]
    return (weights[..., None] * values.repeat_interleave(shares, 0)).sum(1)


@pytest.mark.parametrize("window", [None, 10, 100])
@pytest.mark.parametrize("extras", [{}, {"cap": 1.5}, {"sinks_H": torch.linspace(-2, 3, HEADS)}], ids=str)
def test_attention_to_blocks_is_that_of_the_formula(window: int | None, extras: dict) -> None:
    """Some prompts are alone, two and five share a beginning, idle slots lie between."""
    cache = SlotCache(SHAPE, 12, 1024)
    lengths = [1, 64, 65, 190, 700, 3, 128, 200, 40, 90, 129, 300]
    for slot, length in enumerate(lengths):
        common = [5] * 150 if slot in {3, 4, 7, 9, 11} else [6] * 128 if slot in {1, 2} else [10 + slot] * 10
        admit(cache, slot, [*common, *range(30 + slot, 30 + slot + length)])
    slots = [0, 1, 2, 3, 4, 7, 9, 10, 11]
    layer = AttentionLayer(0, 0.7, window, **extras)
    query = torch.randn(len(slots), HEADS, WIDTH, generator=torch.Generator().manual_seed(0)) * 2
    found = decode(cache, slots, layer, query)
    for line, slot in enumerate(slots):
        torch.testing.assert_close(found[line], plain_attention(cache, slot, layer, query[line]))


@pytest.mark.parametrize("shared", [0, 256], ids=["distinct prompts", "shared beginning"])
def test_the_work_of_a_step_grows_with_its_rows_and_not_with_their_product(shared: int) -> None:
    flops, kernels = [], []
    for rows in (4, 8, 16):
        cache = SlotCache(SHAPE, rows, 1024)
        for slot in range(rows):
            admit(cache, slot, [5] * shared + [10 + slot] * 320)
        query = torch.ones(rows, HEADS, WIDTH)
        with FlopCounterMode(display=False) as counter:
            decode(cache, list(range(rows)), AttentionLayer(0, 1.0), query)
        flops.append(counter.get_total_flops())
        with torch.autograd.profiler.profile() as profile:
            decode(cache, list(range(rows)), AttentionLayer(0, 1.0), query)
        kernels.append(sum(event.count for event in profile.key_averages() if event.key == "aten::bmm"))
    assert flops == [flops[0], 2 * flops[0], 4 * flops[0]]
    assert kernels == [2 if not shared else 4] * 3
