"""That `nox -s new -- NAME` makes a plugin that is green before anybody has touched it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load():
    spec = importlib.util.spec_from_file_location("new_plugin", ROOT / "templates" / "new_plugin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """A tree with a new plugin, and with the settings of ours."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    load().make("far-away", tmp_path)
    return tmp_path


# As an installed plugin's entry point would be.
ENTRY = """
from lightning_spans import hooks
from lightning_far_away import plugin
hooks.register(plugin, "far-away")
"""


def start(tree, *command):
    source = str(tree / "plugins" / "far-away" / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTEST_ADDOPTS", None)  # options of the run around it, for its own cache and plugins
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=tree, env=environment)


def test_nothing_of_the_template_is_left_in_it(tree):
    written = [path for path in (tree / "plugins").rglob("*") if path.is_file()] + [*(tree / "tests").rglob("*.py")]
    assert len(written) == 10
    for path in written:
        assert "framework" not in path.name
        left = ("new-framework", "new_framework", "NewFramework", "New Framework")
        assert not [word for word in left if word in path.read_text()]
    project = tomllib.loads((tree / "plugins/far-away/pyproject.toml").read_text())
    assert project["project"]["name"] == "lightning-far-away"
    assert project["project"]["entry-points"]["lightning_spans"] == {"far-away": "lightning_far_away.plugin"}
    assert {"oldest", "latest"} <= set(project["tool"]["lightning"]["versions"])


def test_its_name_is_written_as_people_do(tmp_path):
    load().make("far-away", tmp_path, "FarAway SDK")
    folder = tmp_path / "plugins/far-away"
    assert "Lightning-RL for FarAway SDK: train" in (folder / "README.md").read_text()
    assert "class FarAwaySDKAgents(Tracker):" in (folder / "src/lightning_far_away/agents.py").read_text()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_it_lints(tree):
    pytest.importorskip("ruff", reason="the sessions `tests` and `lint` have it")
    for arguments in (["check", "--fix", "--select", "I"], ["check"], ["format", "--check"]):
        done = start(tree, "ruff", *arguments, "plugins", "tests")
        assert done.returncode == 0, done.stdout


def test_its_promises_are_collected_and_kept(tree):
    pytest.importorskip("openai")
    (tree / "conftest.py").write_text(ENTRY)
    chosen = "output_is_the_same or every_model_call or every_tool_call or detach or rerouted"
    done = start(tree, "pytest", "-p", "no:cacheprovider", "tests", "-k", chosen)
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout


@pytest.mark.parametrize("name", ["Far", "far_away", "-far", "far/../away", "", "2far"])
def test_a_name_that_is_no_distributions_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="no name of a distribution"):
        load().make(name, tmp_path)


def test_a_plugin_that_is_there_is_left_alone(tree):
    with pytest.raises(ValueError, match="there already"):
        load().make("far-away", tree)


def test_the_command_says_what_is_missing():
    done = start(ROOT, "templates.new_plugin")
    assert done.returncode == 1
    assert "nox -s new -- NAME" in done.stderr
