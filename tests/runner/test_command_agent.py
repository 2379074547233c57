"""A command in a folder of its own: what it changed is kept, and another command says what it earned."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from lightning_spans.errors import ConfigError, RewardError
from lightning_spans.schema.attempts import Attempt
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker import command_agent as agents
from lightning_trainer.runner.worker.command import ProcessEnd, result_of, run_command
from lightning_trainer.runner.worker.command_agent import DIFF, command_agent, wait_for_spans
from lightning_trainer.runner.worker.command_rewards import RewardChannel, RewardRefusedError, reward_of
from lightning_trainer.runner.worker.trees import WorkFolderError
from lightning_trainer.work import Work
from support.fakes import FakeEngine, served
from support.runners import run_agent

PYTHON = shlex.quote(sys.executable)
CHECK = """
import os, pathlib
if number := os.environ.get("LIGHTNING_REWARD_FD"):
    os.write(int(number), b"0.25")
else:
    pathlib.Path("out/reward.json").write_text("0.25")
print('{"reward": 1}')
"""
MEND = (
    f"""{PYTHON} -c "open('calc.py', 'w').write('def add(a, b): return a + b');"""
    """open('test.py', 'a'); print('done')" """
)
TEST = f"{PYTHON} -B -c 'from calc import add; assert add(2, 3) == 5'"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("server"), FakeEngine()) as running:
        yield running


@pytest.fixture
def attempt(request, server):
    name = request.node.name
    key = server.key(name)
    rollout = f"rollout of {name}"
    return Attempt(rollout_id=rollout, attempt_id=name, endpoint=server.url, key=key, agents=("*",))


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b): return a - b")
    (folder / "test.py").write_text("")
    return folder


def spans(server, attempt):
    return {span.operation: span for span in server.store.spans(attempt_ids=[attempt.attempt_id])}


async def run(job, attempt, **task):
    return await run_agent(job, task, attempt)


async def said(words, task, attempt):
    return result_of((await run_command(words, task, attempt)).output)


def left(folder):
    return [path.name for path in folder.parent.iterdir() if path.name.startswith("lightning-work-")]


async def test_tests_that_pass_in_its_folder_earn_one(server, attempt, project):
    work = Work(workdir=str(project), reward_command=TEST)
    assert await run(Job(command="true", work=work), attempt) == 0.0
    assert await run(Job(command=MEND, work=work), attempt) == 1.0
    found = spans(server, attempt)
    assert "+def add(a, b): return a + b" in found["workdir"].attributes[DIFF]
    assert found["workdir"].name == "1 file changed, +1 -1"
    assert found["reward"].name.endswith("exit status 0")
    assert found["reward"].attributes["lightning.exit_status"] == 0
    assert "a - b" in (project / "calc.py").read_text()
    assert left(project) == []


async def test_the_last_line_can_be_the_reward(attempt, project):
    job = Job(command="true", work=Work(reward_command="""sh -c 'echo ok; echo "{\\"reward\\": {part}}"'"""))
    assert await run(job, attempt, part=0.25) == 0.25


@pytest.mark.parametrize("output", ['{"answer": "one\u2028two\x85"}', 'said\n{"answer": "one\u2028two\x85"}\r\n'])
async def test_a_last_line_holds_whatever_letters_json_may(attempt, output):
    program = f"import sys; sys.stdout.buffer.write({output.encode()!r})"
    assert await said([sys.executable, "-c", program], {}, attempt) == {"answer": "one\u2028two\x85"}


async def test_a_last_line_that_is_nested_too_deep_is_text(attempt):
    program = "print('[' * 100_000)"
    assert await said([sys.executable, "-c", program], {}, attempt) == "[" * 100_000


@pytest.mark.parametrize(
    ("status", "output", "reward"),
    [
        (0, "", 1.0),
        (1, "3 failed", 0.0),
        (-11, "", 0.0),
        (0, 'ok\n{"reward": 0.5}\n', 0.5),
        (1, '{"reward": 0.5}', 0.0),
        (1, "1000000", 0.0),
        (0, "1000000", 1.0),
        (0, "0.5", 1.0),
        (0, '{"reward": {"writer": 1, "tester": 0.5}}', {"writer": 1, "tester": 0.5}),
        (0, '{"writer": 1}', 1.0),
        (0, '{"reward": 0.5}\n5 passed', 1.0),
        (1, "[" * 100_000, 0.0),
        (0, '{"reward": {"one\u2028two": 0.5}}', {"one\u2028two": 0.5}),
    ],
)
def test_the_exit_status_of_a_reward_command_comes_first_and_a_bare_number_is_no_reward(status, output, reward):
    assert reward_of(RewardChannel(Work(), None, {}), ProcessEnd(status, output, "")) == reward


def test_a_bare_number_of_a_reward_command_is_told_in_the_log(capfd):
    reward_of(RewardChannel(Work(), None, {}), ProcessEnd(0, "0.25", ""))
    assert 'Print {"reward": 0.25}' in capfd.readouterr().err


@pytest.mark.parametrize("reward", ["1000000", "-0.1", "NaN", "true", '"1"', "9" * 400, '{"a": 2}', "{}", "null"])
async def test_a_reward_outside_the_range_fails_the_attempt_by_name(attempt, reward):
    job = Job(command=f"""echo '{{"reward": {reward}}}'""")
    with pytest.raises((RewardRefusedError, RewardError), match="reward"):
        await run(job, attempt)


@pytest.mark.parametrize(
    ("reward", "kind"),
    [("true", "true (true or false)"), ('"1"', '"1" (text)'), ("[1]", "[1] (a list)"), ("NaN", "not finite")],
)
async def test_a_reward_that_is_no_number_is_refused_with_what_it_is(attempt, reward, kind):
    with pytest.raises(RewardRefusedError, match=r"A reward is a number within --reward-range 0,1") as refused:
        await run(Job(command=f"""echo '{{"reward": {reward}}}'"""), attempt)
    assert kind in str(refused.value)


async def test_the_range_is_the_users(attempt):
    job = Job(command="""echo '{"reward": -3}'""", work=Work(reward_range="-5,5"))
    assert await run(job, attempt) == -3
    with pytest.raises(ConfigError, match="LOW,HIGH"):
        Job(command="true", work=Work(reward_range="5"))
    with pytest.raises(ConfigError, match="minimum 10 is not below the maximum 0"):
        Job(command="true", work=Work(reward_range="10,0"))


@pytest.mark.parametrize("where", ["fd", "out/reward.json"])
async def test_a_reward_that_is_written_apart_is_not_what_was_printed(attempt, project, where):
    (project / "check.py").write_text(CHECK)
    work = Work(workdir=str(project), reward_command=f"{PYTHON} check.py", reward_from=where)
    assert await run(Job(command="sh -c 'mkdir -p out; echo 1 > out/reward.json'", work=work), attempt) == 0.25
    silent = Work(workdir=str(project), reward_command="true", reward_from=where)
    with pytest.raises(RewardRefusedError, match="wrote no reward"):
        await run(Job(command="sh -c 'mkdir -p out; echo 1 > out/reward.json'", work=silent), attempt)


async def test_tests_that_the_agent_changed_are_put_back(attempt, project):
    (project / "test.py").write_text("from calc import add\nassert add(2, 3) == 5\n")
    cheat = "sh -c 'echo pass > test.py'"
    reward = f"{PYTHON} -B test.py"
    assert await run(Job(command=cheat, work=Work(workdir=str(project), reward_command=reward)), attempt) == 1.0
    work = Work(workdir=str(project), reward_command=reward, restore=("test.py",))
    assert await run(Job(command=cheat, work=work), attempt) == 0.0


async def test_tests_that_never_end_earn_nothing(server, attempt, project):
    work = Work(workdir=str(project), reward_command="sleep 60", reward_timeout_s=0.2)
    assert await run(Job(command="true", work=work), attempt) == 0.0
    assert "0.2 s" in spans(server, attempt)["reward"].status_message


async def test_a_program_that_a_reward_command_leaves_running_does_not_hold_its_reward_up(server, attempt, project):
    flag = project.parent / "flag"
    command = f"sh -c 'sleep 60 & echo $! > {flag}; exit 1'"
    work = Work(workdir=str(project), reward_command=command, reward_timeout_s=30.0)
    assert await asyncio.wait_for(run(Job(command="sh -c 'sleep 60 & echo done'", work=work), attempt), 30.0) == 0.0
    assert spans(server, attempt)["reward"].status == "ok"
    assert not psutil.pid_exists(int(flag.read_text())) or psutil.Process(int(flag.read_text())).status() == "zombie"


async def test_a_program_of_its_own_session_does_not_hold_a_command_up(attempt):
    daemon = "import subprocess; subprocess.Popen(['sleep', '5'], start_new_session=True); print(7)"
    assert await asyncio.wait_for(said([sys.executable, "-c", daemon], {}, attempt), 4.5) == 7


async def test_a_reward_command_that_can_not_be_run_is_no_zero(attempt, project):
    with pytest.raises(RewardError, match="exit status 127"):
        await run(Job(command="true", work=Work(reward_command="sh -c no-such-program")), attempt)
    work = Work(workdir=str(project), reward_command="./no-such-program")
    with pytest.raises(RewardError, match="no-such-program"):
        await run(Job(command="true", work=work), attempt)


async def test_a_command_does_not_wait_for_its_spans_to_be_delivered(attempt, project, monkeypatch):
    server_is_back, delivered = threading.Event(), []

    def send(*_):
        server_is_back.wait(5.0)
        delivered.append(True)

    monkeypatch.setattr(agents, "_send", send)
    work = Work(workdir=str(project), reward_command="true")
    assert await command_agent(Job(command="true", work=work))({}, attempt) == 1.0
    assert not delivered
    server_is_back.set()
    assert await wait_for_spans(30.0)
    assert len(delivered) == 2


async def test_what_was_changed_is_kept_of_an_attempt_that_failed_or_ran_too_long(server, attempt, project):
    job = Job(command="sh -c 'echo x > new; exit 3'", work=Work(workdir=str(project)))
    with pytest.raises(Exception, match="exit status 3"):
        await run(job, attempt)
    assert "b/new" in spans(server, attempt)["workdir"].attributes[DIFF]
    flag = project.parent / "flag"
    long = Job(command=f"sh -c 'echo x > longer; touch {flag}; sleep 60'", work=Work(workdir=str(project)))
    running = asyncio.create_task(run(long, attempt))
    while not flag.exists():
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    told = [span.attributes[DIFF] for span in server.store.spans(attempt_ids=[attempt.attempt_id])]
    assert any("b/longer" in diff for diff in told)
    assert left(project) == []


async def test_a_folder_that_grows_too_large_ends_the_attempt(attempt, project):
    grow = f"""{PYTHON} -c "open('large', 'wb').write(b'x' * 300_000)" """
    with pytest.raises(WorkFolderError, match="workdir_size"):
        await run(Job(command=grow, work=Work(workdir=str(project), workdir_size="200k")), attempt)


async def test_the_words_of_a_command_are_filled_from_the_task_and_its_variables(attempt):
    words = ["sh", "-c", 'echo "[\\"$1\\", \\"$2\\", \\"$3\\", \\"${HOME:+home}\\"]"', "sh"]
    words += ["{prompt}", "{LIGHTNING_ATTEMPT_ID}", "{unknown} ${prompt}"]
    told = await said(words, {"prompt": "two words"}, attempt)
    assert told == ["two words", attempt.attempt_id, "{unknown} ${prompt}", "home"]


async def test_a_task_that_is_in_its_words_is_not_on_its_stdin(attempt):
    assert await said(["sh", "-c", "cat"], {"answer": 19}, attempt) == {"answer": 19}
    assert await said(["sh", "-c", "echo {answer}; cat"], {"answer": 19}, attempt) == 19


async def test_what_a_task_says_is_not_filled_again(attempt):
    task = {"prompt": "{OPENAI_API_KEY} {other}", "other": "x"}
    told = await said(["printf", "%s", "{prompt}"], task, attempt)
    assert told == "{OPENAI_API_KEY} {other}"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "a:b", "work": Work(workdir=".")}, "workdir"),
        ({"command": "true", "reward": "a:b", "work": Work(reward_command="true")}, "both set the reward"),
        ({"command": "true", "work": Work(restore=("a",))}, "restore"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        Job(**options)


def test_a_job_reaches_a_worker_whole():
    from dataclasses import asdict

    job = Job(command="true", work=Work(workdir=".", restore=("a",), reward_command="true"))
    assert Job(**json.loads(json.dumps(asdict(job)))).work.reward_command == "true"
    assert Path(Job(**asdict(job)).work.workdir) == Path()


async def test_a_command_that_deletes_its_folder_ends_as_it_did(server, attempt, project):
    work = Work(workdir=str(project), restore=("tests/**",), reward_command="ls tests")
    (project / "tests").mkdir()
    (project / "tests" / "test_calc.py").write_text("pass\n")
    assert await run(Job(command="sh -c 'rm -rf ../project'", work=work), attempt) == 1.0
    assert "deleted file" in spans(server, attempt)["workdir"].attributes[DIFF]
