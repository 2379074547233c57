"""Attacks from inside `--sandbox`: on files, processes and the network of the machine that runs a command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Attempt
from lightning_trainer.reasons.call_errors import SCORER_FAILED
from lightning_trainer.runner.sandbox import door, starter
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.command import CommandError
from lightning_trainer.runner.worker.command_agent import command_agent
from lightning_trainer.runner.worker.execution import execute
from lightning_trainer.work import Work
from support.fakes import FakeEngine, served
from support.runners import run_agent

PYTHON = shlex.quote(sys.executable)
bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.skipif(shutil.which("git") is None, reason="no git"),
]

ASK = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
ask = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
said = urllib.request.urlopen(ask).read().decode()
open("answer.txt", "w").write(said)
os.write(int(os.environ["LIGHTNING_REWARD_FD"]), b"0.25" if "[DONE]" in said else b"0")
"""
# Each attack writes its name where it succeeds. It gets what it needs to know in the task.
ATTACK = """
import json, os, signal, socket, subprocess, sys
task, done = json.loads(os.environ["LIGHTNING_TASK"]), []
def attack(name, what):
    try:
        if what() is not False:
            done.append(name)
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
def tcp(host, port):
    socket.create_connection((host, port), timeout=2).close()
def unix(path):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
for path in task["read"]:
    attack("read " + path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
for path in task["write"]:
    attack("write " + path, lambda: os.close(os.open(path, os.O_WRONLY)))
for path in task["make"]:
    attack("make " + path, lambda: os.mkdir(path))
for top, folders, names in os.walk("/proc") if task["dangerous"] else ():
    if top == "/proc":
        folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self")]
    for name in names:
        path = os.path.join(top, name)
        os.access(path, os.W_OK) and attack("open to write " + path, lambda: os.close(os.open(path, os.O_WRONLY)))
for port in task["ports"]:
    attack("reach a port of the machine", lambda: tcp("127.0.0.1", port))
attack("reach another machine", lambda: tcp("192.0.2.1", 80))
attack("resolve a name", lambda: socket.getaddrinfo("example.com", 80))
attack("reach an abstract socket", lambda: unix("\\0" + task["abstract"]))
attack("use the door again", lambda: unix("/run/lightning/door"))
attack("see processes", lambda: os.kill(task["pid"], 0))
attack("read a variable", lambda: "MY_TOKEN" in os.environ)
attack("read a variable of another", lambda: any(
    b"MY_TOKEN=" in open("/proc/%s/environ" % pid, "rb").read() for pid in os.listdir("/proc") if pid.isdigit()))
if task["dangerous"]:
    attack("mount", lambda: subprocess.run(["mount", "-t", "tmpfs", "x", "/usr"], check=True, capture_output=True))
    attack("make a device", lambda: os.mknod("/tmp/mem", 0o020666, os.makedev(1, 1)) or open("/tmp/mem", "rb").read(1))
    attack("set the host's name", lambda: socket.sethostname("taken"))
print(json.dumps({"reward": 0}))
sys.exit(len(done) and "attacks that succeeded: " + ", ".join(done))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), FakeEngine()) as running:
        yield running


@pytest.fixture
def attempt(request, server):
    name = request.node.name
    key = server.key(name)
    return Attempt(rollout_id=f"rollout of {name}", attempt_id=name, endpoint=server.url, key=key, agents=("*",))


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "ask.py").write_text(ASK)
    (folder / "attack.py").write_text(ATTACK)
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


async def run(attempt, command, task=None, **work):
    return await run_agent(Job(command=command, work=Work(**work)), task or {}, attempt)


@pytest.fixture
def targets(tmp_path, project, monkeypatch):
    """What an attacker would want of this machine: secrets, sockets, a process."""
    (tmp_path / "secret").write_text("s")
    monkeypatch.setenv("MY_TOKEN", "a secret of the shell")
    abstract = f"lightning test {os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        yield {
            "read": [str(tmp_path / "secret"), str(project / "ask.py"), "/etc/shadow", "/etc/ssl/private",
                     "/root/.bashrc", "/var/lib", "/sys/kernel", "/dev/kmsg", "/proc/1/root/var", "/home"],
            "write": ["/etc/passwd", "/etc/hosts", "/usr/bin/env", f"{sys.prefix}/pyvenv.cfg",
                      "/run/lightning-starter.py"],
            "make": [str(project / ".git" / "objects" / "x")],
            "ports": [port.getsockname()[1]],
            "abstract": abstract,
            "pid": os.getpid(),
            "dangerous": True,
        }  # fmt: skip


@bubblewrap
async def test_a_command_in_a_sandbox_reaches_nothing_but_its_folder(attempt, project, targets):
    work = {"workdir": str(project), "sandbox": "bwrap"}
    assert await run(attempt, f"{PYTHON} attack.py", targets, **work) == 0.0
    with pytest.raises(CommandError, match=r"read .*secret, .*reach a port of the machine, .*abstract.*see processes"):
        await run(attempt, f"{PYTHON} attack.py", {**targets, "dangerous": False}, workdir=f"{project}@HEAD")


@bubblewrap
async def test_the_reward_command_runs_in_the_sandbox_too_and_reaches_no_gateway(attempt, project, targets, server):
    targets["ports"].append(door.PORT)
    reward = f"{PYTHON} attack.py"
    assert await run(attempt, "true", targets, workdir=str(project), sandbox="bwrap", reward_command=reward) == 0.0
    reward = f"""{PYTHON} -c "import os; assert not [n for n in os.environ if 'KEY' in n or 'ENDPOINT' in n]" """
    assert await run(attempt, "true", {}, workdir=str(project), sandbox="bwrap", reward_command=reward) == 1.0


@bubblewrap
async def test_the_gateway_is_reached_and_a_reward_leaves_by_its_descriptor(attempt, project, server):
    work = {"workdir": str(project), "sandbox": "bwrap", "reward_from": "fd"}
    assert await run(attempt, f"{PYTHON} ask.py", **work) == 0.25
    (call,) = server.store.calls(attempt_ids=[attempt.attempt_id])
    assert call.choices[0].token_ids
    (span,) = [span for span in server.store.spans(attempt_ids=[attempt.attempt_id]) if span.operation == "workdir"]
    assert "answer.txt" in span.attributes["lightning.workdir.diff"]


@bubblewrap
async def test_an_agent_can_commit_and_nothing_reaches_the_repository_of_the_user(attempt, project):
    command = "sh -c 'echo more >> ask.py && git commit -qam changed && git log --oneline | wc -l'"
    reward = "sh -c 'test $(git log --oneline | wc -l) = 2'"
    assert await run(attempt, command, workdir=str(project), sandbox="bwrap", reward_command=reward) == 1.0
    log = subprocess.run(["git", "log", "--oneline"], cwd=project, check=True, capture_output=True)
    assert len(log.stdout.splitlines()) == 1


@bubblewrap
@pytest.mark.parametrize("ending", ["exit 0", "sleep 1000"])
async def test_what_a_command_leaves_running_ends_with_its_sandbox(attempt, project, tmp_path, ending):
    pipe, go = tmp_path / "alive", tmp_path / "go"
    os.mkfifo(pipe)
    os.mkfifo(go)
    script = project / "leave.sh"
    script.write_text(f"setsid env -i sh -c 'exec 9>{pipe}; echo started >&9; sleep 1000' & read x < {go}; {ending}\n")
    work = {"workdir": f"{project}@HEAD", "sandbox": "bwrap", "sandbox_read": (str(script), str(pipe), str(go))}
    running = asyncio.ensure_future(run(attempt, f"sh {script}", reward_command="true", **work))
    reading = await asyncio.to_thread(os.open, pipe, os.O_RDONLY)
    assert await asyncio.to_thread(os.read, reading, 100) == b"started\n"
    await asyncio.to_thread(go.write_text, "\n")
    if ending == "exit 0":
        assert await running == 1.0
    else:
        running.cancel()
        await asyncio.wait({running})
    assert await asyncio.to_thread(os.read, reading, 100) == b""  # the last writer has ended
    os.close(reading)


@bubblewrap
async def test_a_command_that_is_stopped_in_a_sandbox_may_still_save_its_work(attempt, project, tmp_path):
    pipe, script = tmp_path / "told", project / "save.sh"
    os.mkfifo(pipe)
    script.write_text(f"exec 9>{pipe}\ntrap 'echo saved >&9; exit 0' TERM\necho started >&9\nsleep 1000 & wait\n")
    work = {"workdir": f"{project}@HEAD", "sandbox": "bwrap", "sandbox_read": (str(script), str(pipe))}
    running = asyncio.ensure_future(run(attempt, f"sh {script}", reward_command="true", **work))
    with await asyncio.to_thread(pipe.open) as told:
        assert await asyncio.to_thread(told.readline) == "started\n"
        running.cancel()
        await asyncio.wait({running})
        assert await asyncio.to_thread(told.read) == "saved\n"  # to the end: nothing holds the pipe any more


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"sandbox": "bwrap"}, "--workdir"),
        ({"sandbox": "docker", "workdir": "."}, "--sandbox-image"),
        ({"sandbox": "bwrap", "sandbox_image": "x", "workdir": "."}, "docker or podman"),
        ({"sandbox_read": ("/opt",)}, "Give --sandbox"),
    ],
)
def test_options_that_would_protect_nothing_are_refused(work, message):
    with pytest.raises(ConfigError, match=message):
        Job(command="true", work=Work(**work))


def put_program(monkeypatch, folder: Path, name: str, text: str) -> None:
    """Put a program of the test's in front of the machine's."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_machine_that_opens_no_sandbox_is_one_clear_error(project, tmp_path, monkeypatch):
    work = Work(workdir=str(project), sandbox="bwrap")
    refusal = "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2; exit 1\n"
    put_program(monkeypatch, tmp_path / "bin", "bwrap", refusal)
    with pytest.raises(ConfigError, match=r"(?s)--sandbox bwrap does not work .*No permissions.*user namespaces"):
        command_agent(Job(command="true", work=work))
    put_program(monkeypatch, tmp_path / "own", "tool", "#!/bin/sh\n")
    with pytest.raises(ConfigError, match=r"'tool' is in .*own, which the sandbox does not see. Add --sandbox-read"):
        command_agent(Job(command="tool", work=work))
    monkeypatch.setenv("PATH", f"{tmp_path / 'own'}")
    with pytest.raises(ConfigError, match=r"no program 'bwrap' is found. Install bubblewrap"):
        command_agent(Job(command="tool", work=work))


# Records its words and its environment, then does what a container would: starts the starter with the variables that
# were passed by name.
CONTAINER = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == "run":
    mounts = [word[len("type=bind,source="):].split(",target=") for word in words if word.startswith("type=bind")]
    places = {{target.partition(",")[0]: source for source, target in mounts}}
    names = [words[at + 1] for at, word in enumerate(words) if word == "--env"]
    variables = dict(name.split("=", 1) if "=" in name else (name, os.environ[name]) for name in names)
    os.chdir(words[words.index("--workdir") + 1])
    own = words[words.index("--entrypoint") + 3:]
    door, script = own[4], own[3]
    short = os.path.join("/proc", str(os.getpid()), "fd", str(os.open(places[os.path.dirname(door)], os.O_PATH)))
    own[3:5] = [places[script], os.path.join(short, os.path.basename(door))]
    os.set_inheritable(int(short.rpartition("/")[2]), True)
    variables["HOME"] = os.path.join(os.environ["RECORD"] + ".home")
    os.execve(sys.executable, [sys.executable, *own], {{"PATH": os.environ["PATH"], **variables}})
"""


@pytest.mark.parametrize("program", ["docker", "podman"])
async def test_a_container_gets_its_folder_no_network_and_no_key_in_its_words(
    attempt, project, tmp_path, monkeypatch, program
):
    record = tmp_path / "record"
    monkeypatch.setenv("RECORD", str(record))
    put_program(monkeypatch, tmp_path / "bin", program, CONTAINER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(door, "PORT", free.getsockname()[1])
    work = {"workdir": str(project), "sandbox": program, "sandbox_image": "python:3.12", "reward_from": "fd"}
    assert await run(attempt, "python3 ask.py", **work) == 0.25
    tried, _, ran, ended = map(json.loads, record.read_text().splitlines())
    assert "true" in tried
    assert ended == ["rm", "--force", ran[ran.index("--name") + 1]]
    assert {"--rm", "--read-only"} < set(ran)
    for option, value in {"--network": "none", "--cap-drop": "ALL", "--pull": "never"}.items():
        assert ran[ran.index(option) + 1] == value
    assert attempt.key not in "\n".join(ran)
    mounts = [word for word in ran if word.startswith("type=bind")]
    assert [word for word in mounts if not word.endswith(",readonly")] == [
        next(word for word in mounts if "source=" + ran[ran.index("--workdir") + 1] + "," in word)
    ]
    assert len(mounts) == 4  # the folder, the objects of its repository, the door, the starter
    assert any(f"source={project / '.git' / 'objects'}," in word for word in mounts)


@pytest.mark.parametrize(
    ("failure", "limit_s", "why"),
    [
        ("echo 'Error response from daemon: failed to create task' >&2; exit 125", 120.0, "failed to create task"),
        ("exec sleep 60", 0.2, r"over 0\.2 s"),
    ],
)
async def test_a_reward_command_that_the_container_engine_does_not_start_is_the_scorers_failure(
    attempt, project, tmp_path, monkeypatch, failure, limit_s, why
):
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    put_program(monkeypatch, tmp_path / "engine", "engine", CONTAINER)
    failing = f'[ "$1" = run ] && [ -e {tmp_path}/agent-ran ] && {{ {failure}; }}'
    put_program(monkeypatch, tmp_path / "bin", "docker", f'#!/bin/sh\n{failing}\nexec engine "$@"\n')
    box = {"workdir": str(project), "sandbox": "docker", "sandbox_image": "python:3.12"}
    work = Work(**box, reward_command="true", reward_timeout_s=limit_s)
    agent = command_agent(Job(command=f"touch {tmp_path}/agent-ran", work=work))
    ended = await execute(agent, None, {}, attempt, needs_reward=True)
    assert (ended.status, ended.rewards) == ("failed", ())
    assert re.match(rf"(?s){SCORER_FAILED}: docker did not start the reward command: .*{why}", ended.error)


@pytest.mark.parametrize("name", ["KILL", "TERM"])
async def test_a_command_that_is_killed_in_a_sandbox_may_be_the_victim_of_another_program(
    attempt, project, tmp_path, monkeypatch, name
):
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    put_program(monkeypatch, tmp_path / "bin", "docker", CONTAINER)
    work = Work(workdir=str(project), sandbox="docker", sandbox_image="python:3.12")
    agent = command_agent(Job(command=f"sh -c 'kill -{name} $$'", work=work))
    assert (await execute(agent, None, {}, attempt, needs_reward=True)).status == "killed"


def test_a_container_ends_when_its_runner_has_been_killed(tmp_path):
    path = str(tmp_path / "door")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        words = [sys.executable, "-I", "-S", starter.__file__, path, "0", "", "sleep", "1000"]
        with subprocess.Popen(words, env={"HOME": str(tmp_path / "home")}, start_new_session=True) as process:
            line, _ = listener.accept()
            line.sendall(b"+")
            assert line.recv(1) == b"-"
            line.close()
            assert process.wait() != 0


def test_the_door_is_of_its_owner_alone_and_takes_one_starter(tmp_path):
    async def main():
        async with door.Door("http://127.0.0.1:9", (), tmp_path) as opened:
            assert stat.S_IMODE(opened.folder.stat().st_mode) == 0o700
            path = str(opened.folder / door.SOCKET)
            with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
                first.connect(path)
                assert await asyncio.to_thread(first.recv, 1) == b"+"
                with pytest.raises(OSError):  # noqa: PT011 - refused, or the name is gone
                    second.connect(path)

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
