"""A folder of its own for each attempt: what it holds, what was changed in it, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile

import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Attempt
from lightning_spans.store.urls import files_of
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.command_agent import command_agent
from lightning_trainer.runner.worker.trees import WorkFolderError
from lightning_trainer.runner.worker.workfolder import (
    Source,
    WorkFolder,
    check,
    remove_left_over,
    source_of,
)
from lightning_trainer.work import Work

pytestmark = pytest.mark.skipif(os.system("git --version > /dev/null 2>&1") != 0, reason="no git")
MOST = 1 << 20


def git(folder, *words):
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_calc.py").write_text("from calc import add\nassert add(2, 3) == 5\n")
    (folder / ".gitignore").write_text("*.pyc\n")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "-m", "first")
    return folder


def test_removal_of_a_folder_that_has_gone_leaves_the_one_around_it_as_it_is(tmp_path, plain, monkeypatch):
    around = tmp_path / "around"
    around.mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(around))
    folder = WorkFolder(Source(plain, None), MOST)
    folder.remove()
    folder.remove()
    assert around.stat().st_mode & 0o777 == 0o755


@pytest.fixture
def plain(repository):
    for path in sorted((repository / ".git").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (repository / ".git").rmdir()
    return repository


@pytest.fixture
def made():
    folders = []

    def make(source, most=MOST):
        folders.append(WorkFolder(source, most))
        return folders[-1]

    yield make
    for folder in folders:
        folder.remove()


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_what_an_attempt_changes_stays_in_its_folder_and_is_told(request, made, kind):
    source = Source(request.getfixturevalue(kind), None)
    one, two = made(source), made(source)
    (one.path / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (one.path / "new.txt").write_text("new\n")
    (one.path / "cache.pyc").write_text("ignored")
    diff = one.diff()
    assert "-    return a - b\n+    return a + b\n" in diff
    assert "+++ b/new.txt" in diff
    assert "cache.pyc" not in diff
    assert two.diff() == ""
    assert "a - b" in (source.path / "calc.py").read_text()


def test_an_agent_that_commits_or_drops_its_repository_hides_nothing(made, repository):
    committed, dropped = made(Source(repository, None)), made(Source(repository, None))
    for folder in (committed, dropped):
        (folder.path / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    git(committed.path, "commit", "--quiet", "--all", "--message", "mine")
    git(committed.path, "checkout", "--quiet", "-b", "other")
    (dropped.path / ".git").rename(dropped.path.parent / "gone")
    assert committed.diff() == dropped.diff() != ""
    assert git(repository, "branch", "--format", "%(refname:short)").split() == ["main"]
    assert git(committed.path, "remote") == ""


def test_a_revision_is_what_attempts_begin_with(made, repository):
    first = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text("later\n")
    git(repository, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "--all", "-m", "second")
    source = source_of(f"{repository.parent}/{{name}}@{{base}}", {"name": "project", "base": first})
    assert "a - b" in (made(source).path / "calc.py").read_text()
    with pytest.raises(WorkFolderError, match="no-such"):
        made(source_of(f"{repository}@no-such"))


def test_changes_that_no_attempt_would_see_are_refused(repository):
    check(str(repository))
    (repository / "calc.py").write_text("not committed\n")
    with pytest.raises(ConfigError, match="@HEAD"):
        check(str(repository))
    check(f"{repository}@HEAD")
    with pytest.raises(ConfigError, match="no folder"):
        check(str(repository / "gone"))


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_files_are_put_back_and_added_ones_go(request, made, kind):
    folder = made(Source(request.getfixturevalue(kind), None))
    (folder.path / "tests" / "test_calc.py").write_text("pass\n")
    (folder.path / "tests" / "conftest.py").write_text("forged\n")
    (folder.path / "calc.py").write_text("mine\n")
    folder.restore(["tests/**"])
    assert "assert" in (folder.path / "tests" / "test_calc.py").read_text()
    assert not (folder.path / "tests" / "conftest.py").exists()
    assert (folder.path / "calc.py").read_text() == "mine\n"
    with pytest.raises(WorkFolderError, match="no-such"):
        folder.restore(["no-such/**"])


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_added_files_go_though_the_agent_hides_them(request, made, kind):
    source = Source(request.getfixturevalue(kind), None)
    (source.path / "tests" / "there.pyc").write_text("ignored from the start")
    folder = made(source)
    (folder.path / ".gitignore").write_text("conftest.py\n*.pyc\n")
    (folder.path / "tests" / "conftest.py").write_text("forged\n")
    (folder.path / "tests" / "forged.pyc").write_text("forged\n")
    (folder.path / "conftest.py").write_text("not asked for\n")
    (inner := folder.path / "tests" / "inner").mkdir()
    git(inner, "init", "--quiet")
    git(inner, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "--allow-empty", "-m", "first")
    (inner / "test_inner.py").write_text("forged\n")
    folder.restore(["tests/**"])
    there = ["there.pyc"] if kind == "plain" else []
    assert sorted(path.name for path in (folder.path / "tests").iterdir()) == ["test_calc.py", *there]
    assert (folder.path / "conftest.py").exists()


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_a_test_that_the_agent_renamed_goes_too(request, made, kind):
    folder = made(Source(request.getfixturevalue(kind), None))
    (folder.path / "tests" / "test_calc.py").rename(folder.path / "tests" / "conftest.py")
    folder.restore(["tests/**"])
    assert [path.name for path in (folder.path / "tests").iterdir()] == ["test_calc.py"]


@pytest.mark.parametrize("instead", [None, "file", "link"])
@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_an_agent_that_takes_its_folder_away_has_deleted_all_files(request, made, tmp_path, kind, instead):
    folder = made(Source(request.getfixturevalue(kind), None))
    shutil.rmtree(folder.path)
    if instead == "file":
        folder.path.write_text("mine")
    if instead == "link":
        folder.path.symlink_to(tmp_path)
    folder.check_size()
    assert "deleted file mode 100644\nindex" in folder.diff()
    folder.restore(["tests/**"])
    assert [path.name for path in folder.path.iterdir()] == ["tests"]
    assert list(folder.path.glob("tests/test_calc.py"))


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_a_repository_without_a_commit_that_an_agent_makes_hides_nothing_else(request, made, kind):
    folder = made(Source(request.getfixturevalue(kind), None))
    for place in ("new", "tests/new"):
        (inner := folder.path / place).mkdir()
        git(inner, "init", "--quiet")
        (inner / "conftest.py").write_text("forged\n")
    (folder.path / "calc.py").write_text("mine\n")
    assert "+mine" in folder.diff()
    folder.restore(["tests/**"])
    assert [path.name for path in (folder.path / "tests").iterdir()] == ["test_calc.py"]
    assert (folder.path / "new" / "conftest.py").exists()


@pytest.mark.parametrize("setting", ["clone.defaultRemoteName=upstream", "diff.noPrefix=true", "diff.orderFile=/gone"])
def test_what_the_user_tells_git_at_home_changes_nothing(made, repository, monkeypatch, setting):
    name, value = setting.split("=")
    monkeypatch.setenv("HOME", str(repository.parent))
    git(repository, "config", "--global", name, value)
    folder = made(Source(repository, None))
    (folder.path / "calc.py").write_text("mine\n")
    assert "+++ b/calc.py" in folder.diff()
    assert git(folder.path, "remote") == ""


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_the_folder_above_may_be_a_workdir(request, made, monkeypatch, kind):
    source = request.getfixturevalue(kind)
    monkeypatch.chdir(source / "tests")
    assert (made(source_of("..")).path / "calc.py").exists()


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_runs_and_stores_of_ours_in_it_are_no_changes_and_no_part_of_it(request, made, monkeypatch, kind):
    source = request.getfixturevalue(kind)
    monkeypatch.chdir(source)
    for name in ("runs/today/lightning.db", "comparisons/today/grpo/lightning.db", "lightning.db", "lightning.db-wal"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"x" * MOST)
    check(".")
    folder = made(source_of("."))
    assert not {"runs", "comparisons", "lightning.db"} & {path.name for path in folder.path.iterdir()}
    (source / "evals" / "first").mkdir(parents=True)
    (source / "evals" / "first" / "new.py").write_text("the user's\n")
    if kind == "repository":
        with pytest.raises(ConfigError, match="@HEAD"):
            check(".")
    else:
        assert (made(source_of(".")).path / "evals" / "first" / "new.py").exists()


@pytest.mark.parametrize("kind", ["repository", "plain"])
@pytest.mark.parametrize(
    "name",
    [
        "lightning.key",
        "lightning.key.runner",
        "lightning.key.secret",
        "lightning.key.secret.keys",
        ".lightning.key.secret.keys.lock",
        "service/lightning.key.secret",
        "service/lightning.db",
        "lightning-logs/worker-0.log",
        "lightning-spool/1.spans",
        "attacks/today/lightning.db",
        "loops/planner/1/options.json",
    ],
)
def test_keys_and_records_of_ours_in_it_are_no_changes_and_no_part_of_it(request, made, monkeypatch, kind, name):
    source = request.getfixturevalue(kind)
    monkeypatch.chdir(source)
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_text("secret")
    check(".")
    assert not (made(source_of(".")).path / name).exists()


@pytest.mark.parametrize("kind", ["repository", "plain"])
@pytest.mark.parametrize("name", ["keys/mine.txt", "records.db", "results/7/config.json", "undelivered/1.spans"])
def test_paths_that_options_name_are_no_changes_and_no_part_of_it(request, tmp_path, monkeypatch, kind, name):
    source = request.getfixturevalue(kind)
    monkeypatch.chdir(source)
    monkeypatch.setenv("LIGHTNING_SPOOL", "undelivered")
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_text("secret")
    withheld = ("keys/mine.txt", "results", *map(str, files_of("sqlite:///records.db")))
    listing = tmp_path / "listing"
    command = f"sh -c 'find . > {listing}'"
    job = Job(command=command, needs_reward=False, work=Work(workdir="."), withheld=withheld)
    asyncio.run(command_agent(job)({}, Attempt("rollout", "attempt")))
    seen = listing.read_text().splitlines()
    assert "./calc.py" in seen
    assert f"./{name}" not in seen


@pytest.mark.parametrize("kind", ["repository", "plain"])
def test_a_folder_has_a_limit(request, made, kind):
    source = Source(request.getfixturevalue(kind), None)
    folder = made(source, 200_000)
    folder.check_size()
    (folder.path / "large").write_bytes(b"x" * 200_001)
    with pytest.raises(WorkFolderError, match="200000 bytes"):
        folder.check_size()
    (source.path / "large").write_bytes(b"x" * 200_001)
    if kind == "plain":
        with pytest.raises(WorkFolderError, match="200000 bytes"):
            made(source, 200_000)


def test_folders_go_also_where_a_process_was_killed(tmp_path, made, plain):
    folder = made(Source(plain, None))
    root = folder.path.parent
    (folder.path / "locked").mkdir()
    (folder.path / "locked" / "file").touch()
    (folder.path / "locked").chmod(0o500)
    folder.remove()
    assert not root.exists()
    gone, alive = tmp_path / "lightning-work-999999999-x", tmp_path / f"lightning-work-{os.getpid()}-x"
    gone.mkdir()
    alive.mkdir()
    remove_left_over(tmp_path)
    assert not gone.exists()
    assert alive.exists()
