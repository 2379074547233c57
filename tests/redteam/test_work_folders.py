"""Attacks with files that an agent leaves in its work folder: on whoever reads, restores and deletes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Attempt
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker import baseline, trees, workfolder
from lightning_trainer.runner.worker.command_rewards import RewardRefusedError
from lightning_trainer.runner.worker.trees import WorkFolderError
from lightning_trainer.runner.worker.workfolder import Source, WorkFolder, remove_left_over
from lightning_trainer.work import Work
from support.runners import run_agent

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")
MOST = 1 << 30
DEEP = 1_300


def git(folder, *words, given=None):
    identity = ("-c", "user.name=n", "-c", "user.email=e@x")
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, input=given)
    return done.stdout.decode()


@pytest.fixture(params=["repository", "plain"])
def source(request, tmp_path):
    folder = tmp_path / "project"
    (folder / "tests").mkdir(parents=True)
    (folder / "calc.py").write_text("def add(a, b): return a - b\n")
    (folder / "tests" / "test_calc.py").write_text("assert add(2, 3) == 5\n")
    if request.param == "repository":
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", "first")
    return Source(folder, None)


@pytest.fixture
def folder(source):
    made = WorkFolder(source, MOST)
    yield made
    made.remove()


def trap(folder: Path, proof: Path, *, attributes: str = "* filter=trap diff=trap merge=trap\n") -> None:
    """Make a repository whose settings name a program wherever git would run one; it leaves `proof` behind."""
    script = folder.parent / f"{folder.name}-trap.sh"
    script.write_text(f"#!/bin/sh\ntouch '{proof}'\ncat\n")
    script.chmod(0o755)
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q")
    (folder / "kept.txt").write_text("kept\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    for name in ("clean", "smudge", "process"):
        git(folder, "config", f"filter.trap.{name}", str(script))
    for name in ("core.fsmonitor", "diff.trap.textconv", "diff.trap.command", "diff.external", "core.pager"):
        git(folder, "config", name, str(script))
    git(folder, "config", "core.hooksPath", str(script.parent))
    (folder / ".gitattributes").write_text(attributes)
    (folder / "kept.txt").write_text("changed\n")


def test_git_runs_no_program_that_an_agent_names(folder, tmp_path):
    proof = tmp_path / "it ran"
    for place in (folder.path / "inner", folder.path / "tests" / "inner", folder.path):
        trap(place, proof)
    proof.unlink(missing_ok=True)  # our own git has run some of them here
    assert "+++ b/inner/kept.txt" in folder.diff()
    folder.restore(["tests/**"])
    assert not proof.exists()
    assert [path.name for path in (folder.path / "tests").iterdir()] == ["test_calc.py"]


def test_git_runs_no_program_of_repositories_in_a_folder_that_is_copied(tmp_path):
    proof, source = tmp_path / "it ran", tmp_path / "project"
    source.mkdir()
    trap(source / "inner", proof)
    proof.unlink(missing_ok=True)
    made = WorkFolder(Source(source, None), MOST)
    (made.path / "inner" / "kept.txt").write_text("mine\n")
    assert "-changed\n+mine\n" in made.diff()
    made.restore(["inner/**"])
    assert (made.path / "inner" / "kept.txt").read_text() == "changed\n"
    made.remove()
    assert not proof.exists()


# Wherever git would run a program, or speak to another machine: none of it is in the traps above.
SETTINGS = """
[core]
sshCommand = {0}
gitProxy = {0}
alternateRefsCommand = {0}
fsmonitor = {0}
[filter "trap"]
clean = {0}
process = {0}
required = true
[remote "origin"]
url = ext::{0}
promisor = true
[extensions]
partialClone = origin
[protocol "ext"]
allow = always
[credential]
helper = !{0}
[submodule "inner"]
url = ext::{0}
update = !{0}
active = true
"""
OTHER_WAYS = ["settings", "included", "elsewhere", "submodule", "alternates", "replaced", "hooks"]


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_git_obeys_nothing_that_an_agent_writes_about_its_repository(folder, tmp_path, way):
    proof, script, own = tmp_path / "it ran", tmp_path / "program.sh", folder.path / ".git"
    script.write_text(f"#!/bin/sh\ntouch '{proof}'\ncat\n")
    script.chmod(0o755)
    settings = SETTINGS.format(script)
    if not own.exists():
        git(folder.path, "init", "-q")
        git(folder.path, "add", ".")
        git(folder.path, "commit", "-qm", "mine")
    (folder.path / ".gitattributes").write_text("* filter=trap\n")
    if way == "settings":
        (own / "config").write_text(settings)
    elif way == "included":
        (tmp_path / "more").write_text(settings)
        (own / "config").write_text(
            f'[include]\npath = {tmp_path}/more\n[includeIf "gitdir:**"]\npath = {tmp_path}/more\n'
        )
    elif way == "elsewhere":
        shutil.move(own, tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "config").write_text(settings)
        own.write_text(f"gitdir: {tmp_path}/elsewhere\n")
    elif way == "submodule":
        inner = folder.path / "inner"
        trap(inner, proof)
        (inner / ".git" / "config").write_text(settings)
        (folder.path / ".gitmodules").write_text(f'[submodule "inner"]\npath = inner\nurl = ext::{script}\n')
    elif way == "alternates":
        (own / "objects" / "info").mkdir(exist_ok=True)
        (own / "objects" / "info" / "alternates").write_text("/dev/zero\n/proc/self/fd\n../../../../../../etc\n")
    elif way == "replaced":
        old = git(folder.path, "rev-parse", "HEAD:tests/test_calc.py").strip()
        git(folder.path, "replace", old, git(folder.path, "hash-object", "-w", "--stdin", given=b"pass\n").strip())
    else:
        for name in ("post-checkout", "post-index-change", "reference-transaction", "pre-commit"):
            (own / "hooks").mkdir(exist_ok=True)
            shutil.copy(script, own / "hooks" / name)
    (folder.path / "tests" / "test_calc.py").write_text("pass\n")
    proof.unlink(missing_ok=True)  # the git of this test ran some
    assert "-assert add(2, 3) == 5\n+pass\n" in folder.diff()
    folder.restore(["tests/**"])
    assert (folder.path / "tests" / "test_calc.py").read_text() == "assert add(2, 3) == 5\n"
    assert not proof.exists()


def test_what_can_not_be_deleted_is_a_warning_and_the_next_folder_is_made(source, folder, caplog):
    kept = folder.path / "kept"
    kept.write_text("x")
    if os.geteuid() or subprocess.run(["chattr", "+i", kept], check=False, capture_output=True).returncode:
        pytest.skip("a file is made immutable by root alone, and not on every file system")
    try:
        folder.remove()
        assert "can't be deleted" in caplog.text
        later = WorkFolder(source, MOST)
        assert later.diff() == ""
        later.remove()
    finally:
        subprocess.run(["chattr", "-i", kept], check=True)


@pytest.mark.parametrize("attributes", ["* working-tree-encoding=nonsense\n", "* text eol=crlf ident\n", "* -diff\n"])
def test_attributes_of_an_agent_change_neither_what_is_told_nor_what_is_put_back(folder, attributes):
    (folder.path / ".gitattributes").write_text(attributes)
    (folder.path / "tests" / ".gitattributes").write_text(attributes)
    (folder.path / "tests" / "test_calc.py").write_text("pass\n")
    assert "-assert add(2, 3) == 5\n+pass\n" in folder.diff()
    folder.restore(["tests/**"])
    assert (folder.path / "tests" / "test_calc.py").read_bytes() == b"assert add(2, 3) == 5\n"


def test_nothing_that_an_agent_writes_keeps_its_changes_from_being_told(folder):
    (folder.path / ".gitignore").write_text("*\n")
    (folder.path / "calc.py").write_text("mine\n")
    names = ["git~1", ".g\u200cit", "two\nlines", "-option", ":(glob)x", '"quoted"', os.fsdecode(b"\xff\xfe")]
    for name in names:
        (folder.path / name).write_text("mine\n")
    (folder.path / ".GIT" / "hooks").mkdir(parents=True)
    (folder.path / ".gitmodules").symlink_to("/etc/passwd")
    told = folder.diff()
    assert told.count("diff --git ") == len(names) + 2


@pytest.mark.parametrize("size", [100 << 30, MOST - (1 << 20)])
def test_a_file_of_holes_is_never_read(folder, size, monkeypatch):
    os.truncate(folder.path / "calc.py", size)
    read, read_entry = [], baseline.read_entry
    monkeypatch.setattr(baseline, "read_entry", lambda at, entry: read.append(entry.path) or read_entry(at, entry))
    if size > MOST:
        with pytest.raises(WorkFolderError, match="bytes"):
            folder.diff()
    else:
        assert "Binary files a/calc.py and b/calc.py differ" in folder.diff()
    assert "calc.py" not in read


def test_pipes_and_devices_are_not_waited_for(folder):
    for place in (folder.path, folder.path / "tests"):
        for name in (".gitignore", ".gitattributes", "conftest.py"):
            os.mkfifo(place / name)
    (folder.path / "calc.py").unlink()
    os.mkfifo(folder.path / "calc.py")
    assert "deleted file" in folder.diff()
    folder.restore(["tests/**", "calc.py"])
    assert [path.name for path in (folder.path / "tests").iterdir()] == ["test_calc.py"]
    assert "a - b" in (folder.path / "calc.py").read_text()


def test_links_lead_nobody_out_of_the_folder(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "test_calc.py").write_text("another's\n")
    (outside / "conftest.py").write_text("another's\n")
    shutil.rmtree(folder.path / "tests")
    (folder.path / "tests").symlink_to(outside)
    (folder.path / "calc.py").unlink()
    (folder.path / "calc.py").symlink_to(outside / "conftest.py")
    folder.diff()
    folder.restore(["tests/**", "calc.py"])
    assert "a - b" in (folder.path / "calc.py").read_text()
    assert not (folder.path / "tests").is_symlink()
    folder.remove()
    assert {path.read_text() for path in outside.iterdir()} == {"another's\n"}


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_whose_place_is_taken_away_is_made_again_and_nothing_is_written_elsewhere(folder, tmp_path, linked):
    place = folder.path.parent
    shutil.rmtree(place)
    outside = tmp_path / "outside"
    (outside / folder.path.name).mkdir(parents=True)
    if linked:
        place.symlink_to(outside)
    assert "deleted file" in folder.diff()
    folder.restore(["tests/**"])
    assert (folder.path / "tests" / "test_calc.py").read_text() == "assert add(2, 3) == 5\n"
    assert list((outside / folder.path.name).iterdir()) == []
    assert not place.is_symlink()


def test_without_what_it_is_compared_with_a_folder_fails_in_words(folder):
    shutil.rmtree(folder._beside)
    for look in (folder.diff, lambda: folder.restore(["tests/**"])):
        with pytest.raises(WorkFolderError, match=r"work folder|can.t be restored"):
            look()


def test_modes_of_an_agent_keep_nothing_from_being_put_back(folder):
    (folder.path / "tests" / "conftest.py").write_text("forged\n")
    (folder.path / "tests" / "test_calc.py").write_text("pass\n")
    (folder.path / "tests" / "test_calc.py").chmod(0o400)
    (folder.path / "tests").chmod(0)
    folder.path.chmod(0o500)
    script = f"""if True:
        import os, sys
        sys.path[:] = {sys.path!r}
        from lightning_trainer.runner.worker import trees
        from pathlib import Path
        os.setuid(65_534) if os.geteuid() == 0 else None
        trees.remove_entry(Path({str(folder.path)!r}), "tests/conftest.py")
        trees.write_entry(Path({str(folder.path)!r}), "tests/test_calc.py", 0o100644, b"as it was")
    """
    if os.geteuid() == 0:
        for path in (folder.path.parent, folder.path, *folder.path.rglob("*")):
            os.chown(path, 65_534, 65_534)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (folder.path / "tests" / "test_calc.py").read_text() == "as it was"
    assert not (folder.path / "tests" / "conftest.py").exists()


def nest(folder: Path, levels: int) -> None:
    """Make folders inside each other, deeper than any path reaches."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("deeper", dir_fd=descriptor)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(os.open("file", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)


def test_folders_inside_each_other_fail_their_own_attempt_and_no_later_one(folder, tmp_path):
    nest(folder.path / "tests", DEEP)
    for look in (folder.check_size, folder.diff, lambda: folder.restore(["tests/**"])):
        with pytest.raises(WorkFolderError, match="nested deeper"):
            look()
    folder.remove()
    assert not folder.path.parent.exists()
    (left := tmp_path / "lightning-work-999999999-x").mkdir()
    nest(left, DEEP)
    remove_left_over(tmp_path)
    assert not left.exists()


def test_what_another_user_left_is_not_touched_and_no_error_there_stops_anybody(tmp_path, monkeypatch, caplog):
    (left := tmp_path / "lightning-work-999999999-x").mkdir()
    (tmp_path / "lightning-work-999999998-x").symlink_to(tmp_path)
    monkeypatch.setattr(workfolder.os, "geteuid", lambda: os.getuid() + 1)
    remove_left_over(tmp_path)
    assert left.exists()
    monkeypatch.undo()
    monkeypatch.setattr(trees.os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError("busy")))
    remove_left_over(tmp_path)
    assert "busy" in caplog.text
    assert tmp_path.exists()


@pytest.fixture
def attack(source):
    """Run an agent's command in a work folder, and then perhaps a reward command; return the reward."""

    async def run(command: str, path: str = "reward.json", **work: object) -> object:
        options = Work(workdir=str(source.path), reward_from=path, **work)
        return await run_agent(Job(command=command, work=options), {"name": "../../mine"}, Attempt("r", "r.1"))

    return run


async def test_a_reward_behind_a_link_is_not_read(attack, tmp_path):
    (tmp_path / "secret").write_text("0.75")
    with pytest.raises(RewardRefusedError, match="wrote no reward"):
        await attack(f"ln -s {tmp_path / 'secret'} reward.json")
    with pytest.raises(RewardRefusedError, match="wrote no reward"):
        await attack(f"ln -s {tmp_path} out", "out/secret")


async def test_a_reward_behind_a_link_is_not_deleted(attack, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "reward.json").write_text("1")
    with pytest.raises(RewardRefusedError, match="wrote no reward"):
        await attack(f"ln -s {tmp_path / 'mine'} out", "out/reward.json", reward_command="true")
    assert (tmp_path / "mine" / "reward.json").exists()


@pytest.mark.parametrize("words", [{}, {"reward_command": "mkfifo reward.json"}])
async def test_a_pipe_in_place_of_a_reward_does_not_stop_the_runner(attack, words):
    with pytest.raises(RewardRefusedError, match="wrote no reward"):
        await attack("mkfifo reward.json" if not words else "true", **words)


async def test_a_folder_in_place_of_a_reward_is_the_agents_failure(attack):
    with pytest.raises(RewardRefusedError, match="Leave no folder there"):
        await attack("mkdir reward.json", reward_command="true")


async def test_a_path_of_a_reward_stays_in_the_work_folder(attack, tmp_path):
    for path in (str(tmp_path / "reward.json"), "../reward.json", "out/../../reward.json", "."):
        with pytest.raises(ConfigError, match="not in the workdir"):
            await attack("true", path)
    with pytest.raises(ConfigError, match="a task's field makes"):
        await attack("true", "rewards/{name}.json")


def test_a_folder_that_is_copied_may_not_be_nested_without_end(tmp_path):
    (source := tmp_path / "project").mkdir()
    nest(source, DEEP)
    with pytest.raises(WorkFolderError, match="nested deeper"):
        WorkFolder(Source(source, None), MOST)
    trees.remove_tree(source)


def test_a_folder_that_can_not_be_read_is_not_missing_from_a_copy_without_a_word(tmp_path, monkeypatch):
    (tmp_path / "project" / "closed").mkdir(parents=True)
    open_folder = trees._open_folder

    def refuse(root, folder, **more):
        if folder == "closed":
            raise PermissionError(13, "Permission denied", folder)  # root, who may run this test, is refused nothing
        return open_folder(root, folder, **more)

    monkeypatch.setattr(trees, "_open_folder", refuse)
    with pytest.raises(WorkFolderError, match=r"can't be copied.*closed"):
        WorkFolder(Source(tmp_path / "project", None), MOST)
