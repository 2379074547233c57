"""What updates saw of tokens is found again by the row, and by no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_trainer.report.learned_tokens import SeenTokens, read, row_name, write
from lightning_trainer.rl.rows import Row


def row(attempt: str, *tokens: int) -> Row:
    mask = np.arange(len(tokens)) >= 2
    return Row(
        tokens=np.array(tokens, np.int32), mask=mask, logprobs=np.zeros(len(tokens), np.float32),
        advantages=mask.astype(np.float64), lengths=(int(mask.sum()),), agent="a", attempt_id=attempt,
        rollout_id="r", group_id="g",
    )  # fmt: skip


def seen(*values: float) -> SeenTokens:
    return SeenTokens(np.array(values), -np.array(values))


def test_each_row_is_found_by_what_it_is(tmp_path):
    one, two, other = row("a1", 1, 2, 3), row("a1", 1, 2, 4, 5), row("a2", 1, 2, 3)
    write(tmp_path, 3, {row_name(one): seen(0.5), row_name(two): seen(0.25, -0.125)})
    found = read(tmp_path, 3, replace(two))
    assert found is not None
    assert found.gap.tolist() == [0.25, -0.125]
    assert found.entropy.tolist() == [-0.25, 0.125]
    assert read(tmp_path, 3, one).gap.tolist() == [0.5]
    assert read(tmp_path, 3, other) is None
    assert read(tmp_path, 2, one).gap.tolist() == [0.5], "learned a step after it was collected"
    assert read(tmp_path, 4, one) is None


def test_a_step_without_an_update_leaves_no_file(tmp_path):
    write(tmp_path, 0, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [b"", b"PK\x03\x04 half"])
def test_a_file_that_was_cut_is_not_known(tmp_path, left):
    own = row("a1", 1, 2, 3)
    write(tmp_path, 0, {row_name(own): seen(0.5)})
    (tmp_path / "tokens" / "0.npz").write_bytes(left)
    assert read(tmp_path, 0, own) is None
