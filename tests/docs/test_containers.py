"""The container files, as far as they can be read without a daemon: what they copy is there, what they run exists."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest

from lightning_trainer.cli import cli
from support.shown import ROOT

FILE = (ROOT / "docs/cluster/Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docs/cluster/compose.yaml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/how-to/docker.md").read_text(encoding="utf-8")


def test_what_the_images_install_is_there() -> None:
    wanted = set(re.findall(r"/src/([\w/-]+)(?:\[(\w+)\])?", FILE))
    assert ("trainer", "torch") in wanted
    for folder, extra in wanted:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert not extra or extra in project["optional-dependencies"]


def test_the_page_builds_every_stage_and_no_other() -> None:
    assert set(re.findall(r"^FROM \S+ AS (\w+)$", FILE, flags=re.MULTILINE)) == set(re.findall(r"--target (\w+)", PAGE))


def test_the_images_do_not_run_as_root_and_carry_no_secrets_of_the_checkout() -> None:
    assert FILE.rstrip().splitlines()[-1] == "USER lightning"
    assert {".git", "**/*.db", "**/runs", "**/*.key*"} <= set((ROOT / ".dockerignore").read_text().splitlines())


@pytest.mark.parametrize("name", ["server", "runner"])
def test_what_the_services_run_is_a_command(name: str) -> None:
    found = re.search(rf"command: (?:>\s+)?({name} (?:.|\n(?=      ))+)", COMPOSE)
    assert found is not None
    words = shlex.split(re.sub(r"\$\{(\w+)[^}]*\}", "http://x/v1", found[1]))
    command = cli.get_command(cli.make_context("lightning-rl", words), name)
    assert command is not None
    options = command.make_context(name, words[1:]).params
    assert name == "runner" or options["names"]  # otherwise no agent of the runners calls the model


def test_what_the_pods_of_runners_run_is_a_command() -> None:
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "docs/cluster/rayjob.yaml").read_text(encoding="utf-8"))
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    entry = re.findall(r'^ENTRYPOINT \["(.*)"\]$', FILE, flags=re.MULTILINE)
    program, name, *words = container.get("command", entry) + container.get("args", [])
    command = cli.get_command(cli.make_context(program, [name]), name)
    assert command is not None
    command.make_context(name, words)


def test_the_user_of_the_images_can_write_what_the_services_keep() -> None:
    made = re.search(r"chown lightning (.*)", FILE)
    assert made is not None
    assert set(re.findall(r"keys:(/\w+)", COMPOSE)) <= set(made[1].split())


def test_the_image_of_the_page_installs_a_plugin_that_the_images_have_not() -> None:
    program = re.search(r"```dockerfile\n(.*?)```", PAGE, flags=re.DOTALL)
    assert program is not None
    (plugin,) = re.findall(r"/src/([\w/-]+)", program[1])
    assert (ROOT / plugin / "pyproject.toml").exists()
    assert plugin not in FILE.partition("AS trainer")[0]
