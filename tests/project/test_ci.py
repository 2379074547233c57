"""CI: a failing part hides no other, a test that passes alone is FLAKY, and each part is a job of the workflow."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOX = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
if "lint" in arguments:
    sys.exit("style is wrong")
passed = arguments[arguments.index("--") + 1:] if "--" in arguments else []
sys.exit(subprocess.call([sys.executable, "-m", "pytest", "{file}", *passed]))
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The program of CI, with two parts and a nox of its own that runs one test file or fails."""
    spec = importlib.util.spec_from_file_location("parts", ROOT / ".ci/parts.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "parts", module)
    spec.loader.exec_module(module)
    nox = tmp_path / "nox"
    nox.write_text(NOX.format(python=sys.executable, file=tmp_path / "test_it.py"))
    nox.chmod(0o700)
    monkeypatch.setattr(module, "NOX", nox)
    monkeypatch.setattr(module, "PARTS", {"tests": ["tests"], "lint": ["lint"]})
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


def run(parts, monkeypatch: pytest.MonkeyPatch, *names: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run", *names])
    return int(parts.main())


def test_a_test_that_passes_alone_is_flaky_and_does_not_fail_the_run(parts, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\nSEEN = Path(__file__).with_name('seen')\n"
        "def test_good(): pass\n"
        "def test_once():\n    first = not SEEN.exists()\n    SEEN.touch()\n    assert not first\n"
    )
    assert run(parts, monkeypatch, "tests") == 0
    printed = capfd.readouterr().out
    assert re.search(r"^FLAKY: .*test_it.py::test_once$", printed, flags=re.MULTILINE)
    assert "test_good" not in printed


def test_a_test_that_fails_twice_fails_the_run(parts, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "test_it.py").write_text("def test_bad(): assert 0\n")
    assert run(parts, monkeypatch, "tests") == 1
    printed = capfd.readouterr().out
    assert "FLAKY" not in printed
    assert re.search(r"^ +\d+ s: tests FAILED$", printed, flags=re.MULTILINE)


def test_a_part_that_fails_hides_no_other(parts, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "test_it.py").write_text("def test_good(): pass\n")
    assert run(parts, monkeypatch) == 1
    printed = capfd.readouterr().out
    assert "style is wrong" in printed
    assert "1 passed" in printed


def test_the_workflow_has_a_job_for_each_part() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    named = re.search(r"part: \[(.*)\]", workflow)
    listed = subprocess.run(
        [sys.executable, ROOT / ".ci/parts.py", "--list"], capture_output=True, text=True, check=True
    )
    assert named is not None
    assert named[1].split(", ") == listed.stdout.split()
    assert "- run: .ci/run ${{ matrix.part }}\n" in workflow
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_every_pin_is_exact_has_a_hash_and_is_of_the_noxfiles_date() -> None:
    first, *blocks = re.split(r"\n(?! )", (ROOT / "constraints.txt").read_text(encoding="utf-8").strip())
    (date,) = re.findall(
        r'^PUBLISHED_BEFORE = "(.*)"$', (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert date in first
    assert [block for block in blocks if not re.match(r"[\w.-]+==[^\n]+\\\n +--hash=sha256:[0-9a-f]{64}", block)] == []
    assert {"pytest", "ruff", "mypy", "transformers", "zensical"} <= {block.split("==")[0] for block in blocks}
