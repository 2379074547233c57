"""What stands beside the floors, which `nox -s lint` checks: plugins by their own pyproject, names, sizes, import time.

The rules are in docs/explanation/architecture.md. Imports inside functions count as well: being lazy makes an
import cheap, not allowed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "lightning_spans": ROOT / "core/src/lightning_spans",
    "lightning_conformance": ROOT / "conformance/src/lightning_conformance",
    "lightning_trainer": ROOT / "trainer/src/lightning_trainer",
    **{folder.name: folder for folder in sorted(ROOT.glob("plugins/*/src/lightning_*"))},
}


def own_framework(folder: Path) -> set[str]:
    """What a plugin's framework is imported as, by its own pyproject."""
    settings = tomllib.loads((folder.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    return set(settings["tool"]["lightning"]["imports"])


OWN_FRAMEWORK = {name: own_framework(folder) for name, folder in SOURCES.items() if folder.parts[-4] == "plugins"}
FRAMEWORKS = set().union(*OWN_FRAMEWORK.values()) - {"openai"} | {"langchain_openai", "autogen_ext"}
TENSORS = {"torch", "transformers", "peft", "accelerate", "safetensors", "verl", "vllm"}
OURS = set(SOURCES)
# What a package may never import; everything else that it imports, its own pyproject declares.
FORBIDDEN = {
    "lightning_spans": FRAMEWORKS | OURS,
    "lightning_conformance": FRAMEWORKS | TENSORS | OURS - {"lightning_spans"},
    "lightning_openai": FRAMEWORKS | TENSORS | OURS - {"lightning_spans"},
    "lightning_trainer": FRAMEWORKS | OURS - {"lightning_spans"},
}
SMALL_CORE = ("errors.py", "hooks.py", "schema", "chat", "adapter")
DISTRIBUTIONS = importlib.metadata.packages_distributions()
# Imported under a name of its own, but a fixed part of what is declared.
PART_OF = {"starlette": {"fastapi"}, "google.protobuf": {"opentelemetry-proto"}, "google.adk": {"google-adk"}}


class Definition(NamedTuple):
    """A class or function. `lines` are those after its first; a property reads as an attribute."""

    place: str
    name: str
    is_class: bool
    is_property: bool
    lines: int


class Module(NamedTuple):
    """What the rules look at in a module; the syntax tree itself is let go of.

    Attributes:
        package: that it is in.
        path: in the package's folder.
        imports: top-level names of others that it imports, anywhere in it but under `if TYPE_CHECKING`.
        named: all that it imports, as (module, name), typing imports among them; the name is None in `import module`.
        definitions: its classes and functions.
        lines: how many it has.
    """

    package: str
    path: Path
    imports: set[str]
    named: list[tuple[str, str | None]]
    definitions: list[Definition]
    lines: int


@cache
def modules() -> list[Module]:
    return [
        read(package, path.relative_to(folder))
        for package, folder in SOURCES.items()
        for path in sorted(folder.rglob("*.py"))
    ]


def read(package: str, path: Path) -> Module:
    text = (SOURCES[package] / path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    named: list[tuple[str, str | None]] = []
    definitions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            marks = [ast.unparse(decorator) for decorator in node.decorator_list]
            lines = (node.end_lineno or 0) - node.lineno
            is_property = any("property" in mark for mark in marks)
            where = f"{package}/{path.as_posix()}:{node.lineno} {node.name}"
            definitions.append(Definition(where, node.name, isinstance(node, ast.ClassDef), is_property, lines))
    others = imports(tree) - {package} - set(sys.stdlib_module_names)
    return Module(package, path, others, named, definitions, text.count("\n"))


def functions() -> list[Definition]:
    return [found for module in modules() for found in module.definitions if not found.is_class]


def top(name: str) -> str:
    """The name of what is imported; of `google`, which many distributions share, with the part that is one's own."""
    return ".".join(name.split(".")[: 2 if name.startswith("google.") else 1])


def imports(node: ast.AST) -> set[str]:
    """Top-level names that are imported in a node, but under `if TYPE_CHECKING`."""
    found: set[str] = set()
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        children = iter(node.orelse)
    elif isinstance(node, ast.Import):
        found.update(top(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        found.add(top(node.module))
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
        found.update(top(str(given.value)) for given in node.args[:1] if isinstance(given, ast.Constant))
    return found.union(*map(imports, children))


def test_a_module_imports_only_what_its_package_may():
    for module in modules():
        frameworks = FRAMEWORKS - OWN_FRAMEWORK.get(module.package, set())
        others = OURS - {"lightning_spans", "lightning_openai"} | frameworks | TENSORS
        refused = FORBIDDEN.get(module.package, others)
        assert module.imports.isdisjoint(refused), f"{module.package}/{module.path}"


def small_core() -> Iterator[str]:
    for part in SMALL_CORE:
        place = SOURCES["lightning_spans"] / part
        for file in [place] if place.suffix else place.rglob("*.py"):
            yield file.read_text(encoding="utf-8")


def test_the_small_core_has_at_most_2300_lines():
    assert sum(bool(line.strip()) for text in small_core() for line in text.splitlines()) <= 2300


def test_the_small_core_imports_nothing_else_of_ours():
    found = {name for text in small_core() for name in re.findall(r"(?:from|import) (lightning_\w+(?:\.\w+)?)", text)}
    assert found <= {f"lightning_spans.{part.removesuffix('.py')}" for part in SMALL_CORE}


@cache
def declared(package: str) -> set[str]:
    """Distributions that a package declares, its extras' and those of our own packages it depends on among them."""
    project = tomllib.loads((SOURCES[package].parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() for requirement in requirements}
    for name in names & {ours.replace("_", "-") for ours in OURS - {package}}:
        names = names | declared(name.replace("-", "_"))
    return names


def test_what_a_module_imports_its_distribution_declares():
    for module in modules():
        for name in module.imports:
            if name.split(".")[0] not in DISTRIBUTIONS:  # one that is not installed can't be looked up
                continue
            found = {distribution.lower().replace("_", "-") for distribution in DISTRIBUTIONS[name.split(".")[0]]}
            found |= PART_OF.get(name, set())
            assert declared(module.package) & found, f"{module.package}/{module.path}: {name} is not declared"


def test_no_module_is_called_by_a_name_that_says_nothing():
    for module in modules():
        words = {word.strip("_").lower() for part in module.path.parts for word in part.removesuffix(".py").split("_")}
        assert words.isdisjoint({"util", "utils", "helper", "helpers", "misc", "manager"}), module.path


def test_a_class_name_is_used_once():
    """If it fails: name the less public class by what it is, not by a word that another one has."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules():
        for found in module.definitions:
            if found.is_class:
                homes[found.name].append(found.place)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_no_function_has_more_than_60_lines():
    """If it fails: split the function where it reads better."""
    assert [function.place for function in functions() if function.lines >= 60] == []


PARTICIPLE = re.compile(
    r"_*([a-z]+(ed|ing)|held|told|made|kept|said|seen|known|given|taken|drawn|sent|lost|left|found|done|begun|gone"
    r"|bought|brought|built|written|shown|heard|chosen|meant|spent|spoken|thrown|grown|bound|ridden|hidden)"
)
# Verbs and nouns that only look like participles.
NO_PARTICIPLE = {
    "feed",
    "seed",
    "need",
    "meaning",
    "nothing",
    "opening",
    "beginning",
    "routing",
    "sampling",
    "training",
}


def test_ever_fewer_functions_are_named_by_a_participle():
    """If it fails: name the function by a verb, or by the noun that it returns. If fewer are left, lower the number."""
    found = [
        function.place
        for function in functions()
        if function.place.startswith(("lightning_spans/", "lightning_trainer/"))
        and PARTICIPLE.fullmatch(function.name)
        and function.name.strip("_") not in NO_PARTICIPLE
        and not function.is_property
    ]
    assert len(found) <= 230, "\n".join(found)


def test_no_package_takes_the_name_of_another_project():
    assert not [path for path in ROOT.glob("**/src/lightning") if path.is_dir()]


def test_every_plugin_is_checked():
    assert {"lightning_openai", "lightning_langchain"} <= set(SOURCES)


def circles() -> set[frozenset[str]]:
    """Sets of modules that all reach each other by imports."""
    places = {
        ".".join([module.package, *module.path.with_suffix("").parts]).removesuffix(".__init__"): module
        for module in modules()
    }
    graph = {
        name: {f"{source}.{part}" if f"{source}.{part}" in places else source for source, part in module.named}
        & places.keys()
        for name, module in places.items()
    }

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        following = [start]
        while following:
            new = graph[following.pop()] - found
            found |= new
            following += new
        return found

    reach = {name: reached(name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph} - {frozenset()}


def test_no_circle_leaves_its_folder_or_has_more_than_four_files():
    assert [sorted(names) for names in circles() if len(names) > 4] == []
    assert [sorted(names) for names in circles() if len({name.rpartition(".")[0] for name in names}) > 1] == []


def test_no_folder_has_more_than_16_modules():
    """If it fails: look for two ideas in the folder, and give one of them a folder of its own."""
    counts = Counter(
        f"{module.package}/{module.path.parent}" for module in modules() if module.path.name != "__init__.py"
    )
    assert {folder: count for folder, count in counts.items() if count > 16} == {}


def test_no_module_has_more_than_400_lines():
    """If it fails: look for the second idea in it, and give that one a module."""
    assert {f"{module.package}/{module.path}": module.lines for module in modules() if module.lines > 400} == {}


HEAVY = FRAMEWORKS | TENSORS | {"openai", "sqlalchemy", "matplotlib", "tensorboardX", "fastapi", "uvicorn", "numpy"}


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_importing_a_package_imports_nothing_heavy(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    show = f"import sys, {package}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name.split(".")[0] for name in loaded}.isdisjoint(HEAVY)
    assert not [name for name in loaded if name.startswith("opentelemetry.sdk")]
