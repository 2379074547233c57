"""How many rows a worker of verl's takes at once. Without verl."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_trainer.backends.verl.steps.micro_batches import in_order, micro_batch_options

BATCHES = st.integers(1, 4).flatmap(
    lambda workers: st.tuples(
        st.just(workers),
        st.integers(1, 12).flatmap(
            lambda each: st.lists(st.integers(1, 9000), min_size=workers * each, max_size=workers * each)
        ),
    )
)


@given(BATCHES, st.integers(1, 20000))
def test_padded_rows_stay_within_the_budget_unless_one_alone_is_longer(batch, budget):
    workers, lengths = batch
    options = micro_batch_options(lengths, workers, budget, packed=False)
    rows = options["micro_batch_size_per_gpu"]
    assert options["use_dynamic_bsz"] is False
    assert (len(lengths) // workers) % rows == 0, "all workers take as many micro-batches"
    assert rows == 1 or rows * max(lengths) <= budget


@given(BATCHES)
def test_rows_stay_with_their_worker_and_beside_rows_of_their_length(batch):
    workers, lengths = batch
    order, each = in_order(lengths, workers), len(lengths) // workers
    for first in range(0, len(lengths), each):
        part = order[first : first + each]
        assert sorted(part) == list(range(first, first + each))
        assert [lengths[place] for place in part] == sorted(lengths[first : first + each])


@pytest.mark.parametrize(("parallel", "options"), [(1, {"max_token_len_per_gpu": 30001}), (4, {})])
def test_packed_rows_are_bounded_by_verl_unless_one_is_longer_than_the_budget(parallel, options):
    assert micro_batch_options([100, 30001], 1, 16384, packed=True, sequence_parallel=parallel) == options
