"""That every folder in `plugins/` is whole: tested by the kit, in versions that are named and shown in the README."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path for path in (ROOT / "plugins").iterdir() if path.is_dir() and not path.name.startswith((".", "_"))
)
ORDER = ["Install", "Attach", "What becomes a span", "Versions tested"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "templates" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table():
    return load("versions_table")


def conformance(tree, folder):
    """The frameworks that the conformance classes of a plugin's test file name."""
    path = tree / "tests" / "plugins" / f"test_{folder.name.replace('-', '_')}.py"
    if not path.exists():
        return []
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and "PluginConformance" in [ast.unparse(base) for base in node.bases]:
            named = [
                part
                for part in node.body
                if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "framework"
            ]
            found += [ast.literal_eval(part.value) for part in named]
    return found


def check_conformance(tree, folder):
    written = tomllib.loads((folder / "pyproject.toml").read_text())
    if written.get("tool", {}).get("lightning", {}).get("unfit"):  # the reason why the suite does not fit
        return
    entry_points = written["project"]["entry-points"]["lightning_spans"]
    assert conformance(tree, folder) == list(entry_points), f"{folder.name} has no conformance class of its name"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_has_its_conformance_class(folder):
    check_conformance(ROOT, folder)


@pytest.mark.parametrize("left", ["no test file", "another class", "another name"])
def test_a_folder_without_a_conformance_class_fails(left, tmp_path):
    folder = tmp_path / "plugins" / "far-away"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project.entry-points.lightning_spans]\nfar-away = "x"\n')
    tests = tmp_path / "tests" / "plugins"
    tests.mkdir(parents=True)
    base, name = ("object", "far-away") if left == "another class" else ("PluginConformance", "near")
    if left != "no test file":
        (tests / "test_far_away.py").write_text(f"class TestConformance({base}):\n    framework = {name!r}\n")
    with pytest.raises(AssertionError, match="no conformance class"):
        check_conformance(tmp_path, folder)
    (tests / "test_far_away.py").write_text("class TestX(PluginConformance):\n    framework = 'far-away'\n")
    check_conformance(tmp_path, folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugin_names_its_oldest_and_its_latest_version(folder):
    versions = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["lightning"]["versions"]
    assert {"oldest", "latest"} <= set(versions)
    assert all("==" in requirement or "<" in requirement for requirement in versions["oldest"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_plugins_readme_is_in_the_common_order(folder):
    headings = re.findall(r"^## (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert [heading for heading in headings if heading in ORDER] == ORDER


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("place", load("new_plugin").LISTS)
def test_a_plugin_is_named_wherever_all_are(place, folder):
    settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["lightning"]
    words = {
        "pyproject.toml": {f'"{name}"' for name in settings["imports"] if "." not in name},
        "docs/reference/api/plugins.md": {f"lightning_{folder.name.replace('-', '_')}"},
    }
    text = (ROOT / place).read_text(encoding="utf-8")
    missing = {word for word in words.get(place, {f"plugins/{folder.name}"}) if word not in text}
    assert not missing, f"{place} does not name {missing}"


def test_the_table_of_versions_is_the_one_that_the_plugins_name():
    page = table().PAGE.read_text(encoding="utf-8")
    assert table().write_table(page) == page, "stale: nox -s table"


def test_the_table_follows_the_plugins(tmp_path):
    folder = tmp_path / "plugins" / "far-away"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[tool.lightning.versions]\noldest = ["far[x]==1.0", "openai==1.109.1"]\nlatest = ["far", "mcp<2"]\n'
    )
    text = f"a\n{table().BEGIN}\nold\n{table().END}\nb\n"
    made = table().write_table(text, tmp_path)
    assert "| [far-away](../../plugins/far-away) | far 1.0, openai 1.109.1 | far, mcp <2 |" in made
    assert "old\n" not in made
    assert made.startswith("a\n")
    assert made.endswith("b\n")
    assert table().write_table(made, tmp_path) == made
