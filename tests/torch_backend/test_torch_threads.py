"""An update takes as many threads as cores are free, or as many as it is told."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import threads
from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.backends.torch.threads import (
    Reading,
    available_cores,
    cpu_limit,
    free_cores,
    update_threads,
    whole_cores,
)

pytestmark = pytest.mark.torch

cores = st.integers(1, 512)
shares = st.floats(0, 600, allow_nan=False)


def beside(loops: int, ours: int, of: int) -> float:
    """Cores that are free for us on a fair machine where so many busy loops and so many threads of ours run."""
    share = min(1.0, of / (loops + ours)) if loops + ours else 0.0
    idle = max(0.0, of - loops - ours)
    return free_cores(Reading(5.0, 40.0, 7.0), Reading(7.0, 40.0 + 2 * idle, 7.0 + 2 * ours * share))


@given(free=shares, most=cores)
def test_there_is_always_a_thread_and_never_more_than_cores(free: float, most: int) -> None:
    assert 1 <= whole_cores(free, most) <= most


@given(free=shares, more=shares, most=cores)
def test_more_free_cores_never_mean_fewer_threads(free: float, more: float, most: int) -> None:
    assert whole_cores(free, most) <= whole_cores(free + more, most)


@given(of=cores)
def test_all_cores_are_used_where_nobody_else_works(of: int) -> None:
    assert whole_cores(beside(0, 0, of), of) == of
    assert whole_cores(of - 0.3, of) == of  # some light work beside it


@given(of=cores, loops=st.integers(0, 600))
def test_busy_loops_keep_their_cores(of: int, loops: int) -> None:
    """Measured while the process waits."""
    assert whole_cores(beside(loops, 0, of), of) == max(1, of - loops)


@given(of=st.integers(2, 64), loops=st.integers(1, 64), ours=st.integers(1, 64))
def test_own_work_is_not_taken_for_that_of_others(of: int, loops: int, ours: int) -> None:
    """Others who get their fair share beside us leave at least what they leave when we wait."""
    assert beside(loops, ours, of) >= beside(loops, 0, of) - 1e-9
    assert beside(0, min(ours, of), of) == pytest.approx(of)


def test_two_busy_loops_on_two_cores_leave_one_thread() -> None:
    assert whole_cores(beside(2, 0, 2), 2) == 1
    assert whole_cores(beside(2, 2, 2), 2) == 1


def test_idle_time_that_goes_back_is_no_error() -> None:
    assert free_cores(Reading(1.0, 10.0, 0.0), Reading(2.0, 9.99, 0.0)) == 0.0


def test_readings_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="later"):
        free_cores(Reading(1.0, 0.0, 0.0), Reading(1.0, 0.0, 0.0))


def looks(*found: float) -> tuple[Callable[[], float], list[float]]:
    left = list(found)
    return lambda: left.pop(0), left


def test_a_fixed_number_is_kept_and_nothing_is_measured() -> None:
    look, _ = looks()
    assert update_threads(3, 2, look) == 3
    assert update_threads(None, 2, look) == 2


def test_what_ends_before_the_update_does_not_count() -> None:
    look, left = looks(0.5, 4.0)
    assert (update_threads("auto", 4, look), left) == (4, [])


def test_a_free_machine_is_looked_at_once() -> None:
    look, left = looks(4.0, 0.0)
    assert (update_threads("auto", 4, look), left) == (4, [0.0])


def test_one_core_needs_no_look() -> None:
    look, _ = looks()
    assert update_threads("auto", 1, look) == 1


def test_a_busy_machine_gets_one_thread() -> None:
    look, _ = looks(0.0, 0.1)
    assert update_threads("auto", 2, look) == 1


@pytest.mark.parametrize("wrong", [0, -1, "all"])
def test_other_numbers_of_threads_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="threads must be auto or a number from 1"):
        make_options("model", {"threads": wrong})


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/pod/worker\n", {"pod/cpu.max": "150000 100000\n", "pod/worker/cpu.max": "max 100000\n"}, 1.5),
        ("0::/pod/worker\n", {"pod/cpu.max": "400000 100000\n", "pod/worker/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cgroup.procs": ""}, math.inf),
        (
            "5:memory:/a\n3:cpu,cpuacct:/docker/0123\n1:cpuset:/b\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, math.inf),
    ],
    ids=["parent", "nearest", "none", "version 1, path of the host", "version 1, none"],
)
def test_limits_of_control_groups(tmp_path: Path, membership: str, files: dict[str, str], limit: float) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    assert cpu_limit(tmp_path / "membership", tmp_path / "mounted") == limit


def test_no_control_groups_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path / "not there") == math.inf


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_affinity_counts() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from lightning_trainer.backends.torch.threads import available_cores as a, measure_free_cores as m;"
        "print(a(), 0 <= m() < 1.5)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["1", "True"]


@pytest.mark.parametrize(("free", "expected"), [(0.0, 1), (3.0, 3), (8.0, 4)])
def test_an_update_sets_what_it_chose_and_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, free: float, expected: int
) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 4)
    monkeypatch.setattr(threads, "measure_free_cores", lambda: free)
    before = torch.get_num_threads()
    backend = TorchLearner(tiny_model, threads="auto")
    try:
        assert backend.update([])["update_threads"] == expected
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
        backend.close()


def test_this_machine_can_be_read() -> None:
    assert available_cores() >= 1
    assert threads.measure_free_cores() >= 0.0
