from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lightning_spans.errors import ConfigError
from lightning_trainer.cli import cli
from lightning_trainer.runner.target import load_function, split_command
from lightning_trainer.runner.worker.execution import describe


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


def load(spec: str, parameters: tuple[str, ...] = ("task",)) -> object:
    return load_function(spec, option="target", parameters=parameters)


def test_function_is_imported_from_the_current_folder(folder: Path) -> None:
    (folder / "user_app.py").write_text("def run(task, extra=1):\n    return task['x'] + extra\n")
    assert load("user_app:run")({"x": 1}) == 2  # type: ignore[operator]


def test_function_may_lie_in_an_object(folder: Path) -> None:
    (folder / "user_object.py").write_text("class A:\n    def run(self, task): return 5\napp = A()\n")
    assert load("user_object:app.run")({}) == 5  # type: ignore[operator]


@pytest.mark.parametrize("spec", ["user_app", "user_app:", ":run", ""])
def test_target_must_be_module_and_function(spec: str) -> None:
    with pytest.raises(ConfigError, match="write it as module:function"):
        load(spec)


def test_missing_module_says_where_it_was_sought(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no module 'user_none'") as caught:
        load("user_none:run")
    assert str(folder) in str(caught.value)


def test_missing_package_of_a_module_says_which() -> None:
    with pytest.raises(ConfigError, match="no module 'user_none'"):
        load("user_none.sub:run")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raises", "x = 1\nimport user_missing_dependency\n", "(?s)user_raises.py, line 2.*user_missing_dependency"),
        ("exits", "import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("syntax", "def run(task):\n    return (\n", r"user_syntax\.py, line 2"),
        (
            "other",
            "def rune(task): pass\ndef score(task, result): pass\n",
            r"has no 'run'\. Its functions: rune, score",
        ),
        ("number", "run = 3\n", "is not a function but of type int"),
        (
            "plugin",
            "import lightning_no_such\n",
            r"our plugin lightning-no-such: .* uv pip install .*plugins/no-such",
        ),
    ],
)
def test_module_without_a_usable_function_says_what_is_wrong(folder: Path, name: str, text: str, message: str) -> None:
    (folder / f"user_{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(f"user_{name}:run")


@pytest.mark.parametrize("how", ["user_file.py:run", "./user_file.py:run", "sub/user_file.py:run", "sub/user_file:run"])
def test_path_of_a_file_is_told_from_its_module(folder: Path, how: str) -> None:
    (folder / "user_file.py").write_text("def run(task): return 1\n")
    with pytest.raises(ConfigError, match=r"is the path of a file. Name its module, user_file:run") as caught:
        load(how)
    assert ("start in sub" in str(caught.value)) == how.startswith("sub")


@pytest.mark.parametrize("definition", ["class run:\n    def __init__(self, task): ...", "def run(task): yield 1",
                                        "async def run(task): yield 1"])  # fmt: skip
def test_what_can_give_no_reward_is_refused_before_anything_runs(folder: Path, definition: str) -> None:
    name = f"user_shape_{abs(hash(definition))}"
    (folder / f"{name}.py").write_text(definition)
    with pytest.raises(ConfigError, match=r"is a class|is a generator"):
        load(f"{name}:run")
    if "class" not in definition:
        assert load_function(f"{name}:run", option="rewards", parameters=("trace",), yields=True)


@pytest.mark.parametrize("definition", ["def run(): pass", "def run(task, model): pass", "def run(*, task): pass"])
def test_wrong_signature_shows_how_it_is_called(folder: Path, definition: str) -> None:
    name = f"user_signature_{abs(hash(definition))}"
    (folder / f"{name}.py").write_text(definition)
    with pytest.raises(ConfigError, match=r"called as run\(task\)"):
        load(f"{name}:run")


def test_reward_takes_task_and_result(folder: Path) -> None:
    (folder / "user_reward.py").write_text("def score(task, result): return 1\ndef bad(task): return 1\n")
    load("user_reward:score", ("task", "result"))
    with pytest.raises(ConfigError, match=r"called as bad\(task, result\)"):
        load("user_reward:bad", ("task", "result"))


def test_command_is_split_as_a_shell_would() -> None:
    assert split_command(f"{sys.executable} -c 'print(1)'") == [sys.executable, "-c", "print(1)"]


@pytest.mark.parametrize(
    ("command", "message"), [("", "is empty"), ("'", "quotes"), ("no-such-program-here x", "no program")]
)
def test_command_that_can_not_start_is_an_error(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_command(command)


def test_what_was_noted_on_an_error_comes_before_it() -> None:
    error = ValueError("no such table")
    error.add_note("During task with name 'checker'")
    told = describe(error).splitlines()
    assert told[0] == "During task with name 'checker'"
    assert told[-1] == "ValueError: no such table"
    assert error.__notes__ == ["During task with name 'checker'"]


def test_a_script_without_an_interpreter_is_refused_with_what_to_add(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("echo 1\n")
    script.chmod(0o700)
    with pytest.raises(ConfigError, match=r"first line such as #!/bin/sh") as error:
        split_command(f"{script} --fast")
    assert "\n" not in str(error.value)
    script.write_text("#!/bin/sh\necho 1\n")
    assert split_command(f"{script} --fast") == [str(script), "--fast"]
    assert split_command(sys.executable) == [sys.executable]


def test_isolation_is_refused_where_ray_has_no_main_thread_to_give() -> None:
    done = CliRunner().invoke(cli, ["runner", "user_app:run", "--server", "http://127.0.0.1:1", "--ray", "--isolate"])
    assert done.exit_code == 2
    assert "which an actor of --ray does not have" in done.stderr
