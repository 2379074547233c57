"""The tutorial, done as it says; and every command line of the docs, as far as it can be read without running it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.schema.rewards import as_rewards
from lightning_trainer.cli import COMMANDS, cli
from support.shown import PAGES, ROOT, blocks, calls_of

PATH = ("index", "attach", "reward", "train", "evaluate", "serve")
TUTORIAL = [ROOT / "docs/tutorial" / f"{name}.md" for name in PATH]
PROGRAM = Path(__file__).parent / "tutorial"
LATER = {"eval"} - set(COMMANDS)  # shown already, not there yet
LINES = [
    pytest.param(arguments, id=f"{page.relative_to(ROOT)}: {' '.join(arguments)[:60]}")
    for page in PAGES
    for block in blocks(page)
    for line in block
    if (arguments := calls_of("lightning-rl", line)) and arguments[0] not in LATER
]


def test_command_lines_are_found() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize("arguments", LINES)
def test_a_command_line_of_the_docs_has_options_that_are_there(arguments: list[str]) -> None:
    name, *rest = arguments
    context = cli.make_context("lightning-rl", [name, *rest])
    command = cli.get_command(context, name)
    assert command is not None, f"there is no command {name}"
    made = command.make_context(name, rest, parent=context)
    if hasattr(command, "get_command") and rest:
        assert command.get_command(made, rest[0]) is not None


def test_an_option_that_is_not_there_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_a_command_line_of_the_docs_has_options_that_are_there(["train", "my_app:run", "--no-such-thing"])


def commands() -> list[list[str]]:
    """Return what the tutorial has typed after the installation, block by block."""
    shown = [block for page in TUTORIAL for block in blocks(page)]
    return [block for block in shown if not any("install" in line or "mkdir" in line for line in block)]


def copied(folder: Path) -> Path:
    """Make the files of the tutorial, as a reader does."""
    text = "".join(page.read_text(encoding="utf-8") for page in TUTORIAL)
    for title, program in re.findall(r'^```python title="(\S+)"\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE):
        (folder / title).write_text(program, encoding="utf-8")
    return folder


def test_the_tasks_of_the_tutorial_are_written_and_its_program_runs_on_them(tmp_path: Path) -> None:
    copied(tmp_path)
    subprocess.run([sys.executable, "make_tasks.py"], cwd=tmp_path, check=True)
    tasks = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    held_out = (tmp_path / "val.jsonl").read_text().splitlines()
    assert (len(tasks), len(held_out)) == (54, 18)

    def answer(body, seen):
        return Reply(" refund\n" if body["max_tokens"] == 6 else "We will.")

    code = "import asyncio, json, sys, support; print(json.dumps(asyncio.run(support.run(json.loads(sys.argv[1])))))"
    with ScriptedServer(answer) as server:
        environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "k"}
        command = [sys.executable, "-c", code, json.dumps(tasks[0])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert as_rewards(json.loads(done.stdout)) == {"sorter": 1.0, "writer": 1.0}


def test_the_skill_for_coding_agents_names_what_its_first_commands_create(tmp_path: Path) -> None:
    """The project that it creates has each file, function and agent that the later commands name."""
    page = ROOT / "docs/AGENTS.md"
    _, front, _ = page.read_text(encoding="utf-8").split("---\n", 2)
    assert re.fullmatch(r"name: [a-z-]+\ndescription: .{20,1024}\n", front)
    (create,) = [calls_of("lightning-rl", line) for block in blocks(page) for line in block if " init " in line]
    command = [sys.executable, "-m", "lightning_trainer.cli", *create]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / create[1]
    program = (folder / "agent.py").read_text(encoding="utf-8")
    for line in [line for block in blocks(page) for line in block if "agent:run" in line]:
        words = line.split()
        options = dict(pairwise(words))
        module, function = options["--reward"].split(":")
        assert f"def {function}(" in (folder / f"{module}.py").read_text(encoding="utf-8")
        assert all((folder / options[name]).is_file() for name in ("--data", "--val") if name in options)
        assert all(f'"{agent}"' in program for agent in options.get("--agents", "").split(",") if agent)
        assert re.search(r"def run\(", program)


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[dict[str, subprocess.CompletedProcess[str]]]:
    """Everything that the tutorial types, typed: each command with what became of it."""
    folder, done, exports = copied(tmp_path), {}, ""
    servers: list[subprocess.Popen[str]] = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    try:
        for line in [line for block in commands() for line in block]:
            words = f"{exports}{line.replace('lightning-rl', f'{sys.executable} -m lightning_trainer.cli')}"
            if line.startswith("export "):
                exports += f"{line}\n"
            elif line.startswith("lightning-rl serve"):
                server = subprocess.Popen(
                    ["bash", "-c", f"exec {words}"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
                )
                servers.append(server)
                assert server.stdout is not None
                assert "url" in json.loads(server.stdout.readline())
            else:
                run = ["bash", "-ec", words]
                done[line] = subprocess.run(
                    run, cwd=folder, env=environment, capture_output=True, text=True, check=False
                )
                assert done[line].returncode == 0, f"{line}\n{done[line].stdout}\n{done[line].stderr}"
        yield done
    finally:
        for server in servers:
            server.terminate()
            server.wait(60)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.timeout(3600)
def test_each_command_of_the_tutorial_does_what_it_says(
    typed: dict[str, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    said = {line.split()[1]: done.stdout for line, done in typed.items()}
    result = json.loads(said["train"].splitlines()[-1])
    assert result["reward_after"] > result["reward_before"] + 0.1
    assert "sorter" in said["agents"]
    assert "difference" in said["eval"]
    assert "writer" in said["blame"]
    assert "chat" in said["traces"]
    assert (tmp_path / "runs" / "first" / "curve.png").stat().st_size
