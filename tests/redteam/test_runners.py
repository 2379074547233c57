"""Attacks from a runner's machine: with the key of another runner, and by an agent that looks around."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from lightning_spans.errors import ConfigError, RefusedError
from lightning_spans.record.delivery.otlp import PROTOBUF, encode
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store.http import HttpStore
from lightning_spans.store.traces import traces_of
from lightning_spans.store.urls import without_secrets
from lightning_spans.terms import make_terms
from lightning_trainer.cli import main, processes
from lightning_trainer.cli.servers.upstream_keys import with_keys
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.gateway.upstream.upstream import parse_upstream
from lightning_trainer.runner import undumpable
from lightning_trainer.runner.environment import allowed_environment, without_keys
from support.gateway.theft import reward_of, span_of


@pytest.fixture
def claimed(server, request):
    """An attempt that the runner ``a`` works on."""
    server.store.enqueue([Rollout(rollout_id=f"r {request.node.name}", group_id="g", task={})])
    with closing(HttpStore(server.url, key=server.keys.issue("runner", holder="a"))) as runner:
        (attempt,) = runner.claim("w")
    return attempt


@pytest.fixture
def thief(server):
    with closing(HttpStore(server.url, key=server.keys.issue("runner", holder="b"))) as runner:
        yield runner


def test_a_runner_can_not_end_or_reward_what_another_claimed(server, claimed, thief):
    """Though it knows the fence: those are small numbers."""
    with pytest.raises(RefusedError, match="a different key"):
        thief.finish(claimed.attempt_id, claimed.fence, status="failed")
    with pytest.raises(RefusedError, match="a different key"):
        thief._end_one(_end(claimed))
    assert thief.heartbeat([(claimed.attempt_id, claimed.fence)]) == [claimed.attempt_id]
    assert server.store.attempts(attempt_ids=[claimed.attempt_id])[0].status == "running"
    with closing(HttpStore(server.url, key=server.keys.issue("runner", holder="a"))) as owner:
        assert owner.heartbeat([(claimed.attempt_id, claimed.fence)]) == []
        assert owner.finish(claimed.attempt_id, claimed.fence, status="succeeded") == "succeeded"


def _end(attempt):
    from lightning_spans.schema.attempts import End

    return End(attempt.attempt_id, attempt.fence, "succeeded")


def test_whose_an_attempt_is_is_still_known_after_a_restart(server, claimed):
    from lightning_trainer.gateway.auth.leases import Leases

    grants = {name: server.keys.check(server.keys.issue("runner", holder=name)) for name in "ab"}
    fresh = Leases(server.store)
    assert fresh.of_others(grants["b"], [claimed.attempt_id]) == {claimed.attempt_id}
    assert fresh.of_others(grants["a"], [claimed.attempt_id, "unknown"]) == set()


@pytest.mark.parametrize("holder", ["a", "b"])
def test_a_runners_key_rewards_nothing_but_at_the_end_of_its_own_attempts(ask, server, claimed, holder):
    key = server.keys.issue("runner", holder=holder)
    for changes in ({}, {"attempt_id": "nowhere", "rollout_id": "nowhere"}):
        assert ask("POST", "/api/rewards", key, json={"rewards": [reward_of(claimed, **changes)]}).status_code == 403
    assert ask("POST", "/api/spans", key, json={"spans": []}).status_code == 403
    assert server.store.rewards(attempt_ids=[claimed.attempt_id, "nowhere"]) == []


def test_a_runners_key_sends_no_spans_of_attempts_that_another_claimed(ask, server, claimed):
    span = span_of(claimed.attempt_id, span_id="2" * 16, rollout_id=claimed.rollout.rollout_id)
    for holder, kept in (("b", 0), ("a", 1)):
        key = server.keys.issue("runner", holder=holder)
        ask("POST", "/v1/traces", key, content=encode([span]), headers={"content-type": PROTOBUF})
        assert len(server.store.spans(attempt_ids=[claimed.attempt_id])) == kept


def _send(ask, key, *spans):
    return ask("POST", "/v1/traces", key, content=encode(spans), headers={"content-type": PROTOBUF})


def test_a_runners_key_sends_no_spans_of_attempts_before_they_are_claimed(ask, server):
    """Ids of attempts can be guessed, and another runner may claim the attempt later."""
    server.store.enqueue([Rollout(rollout_id="unclaimed", group_id="g", task={})])
    span = span_of("unclaimed.1", span_id="3" * 16, rollout_id="unclaimed")
    reply = _send(ask, server.keys.issue("runner", holder="b"), span)
    assert (reply.status_code, b"attempt unclaimed.1 of rollout unclaimed" in reply.content) == (200, True)
    with closing(HttpStore(server.url, key=server.keys.issue("runner", holder="a"))) as runner:
        (attempt,) = runner.claim("w", within=["unclaimed"])
    assert attempt.attempt_id == "unclaimed.1"
    assert server.store.spans(attempt_ids=["unclaimed.1"]) == []


def test_a_runners_key_sends_no_spans_of_production_or_under_another_rollout(ask, server, claimed):
    key = server.keys.issue("runner", holder="a")
    terms = make_terms(tenant="acme", consent="granted")
    trace = {"trace_id": "c" * 32, "origin": "live", "attributes": terms}
    loose = span_of(None, span_id="4" * 16, **trace)
    elsewhere = span_of(claimed.attempt_id, span_id="5" * 16, rollout_id="of another", **trace)
    own = span_of(claimed.attempt_id, span_id="6" * 16, rollout_id=claimed.rollout.rollout_id, **trace)
    assert _send(ask, key, loose, elsewhere, own).status_code == 200
    [kept] = server.store.spans(trace_ids=["c" * 32])
    assert (kept.span_id, kept.origin) == (own.span_id, "training")
    assert traces_of(server.store, origin="live") == []


@pytest.mark.parametrize("end", ["finished", "lost"])
def test_a_runners_key_sends_spans_of_its_attempt_after_its_end_and_after_the_claim_was_lost(ask, server, end):
    """An honest runner delivers late what its spool holds."""
    rollout = Rollout(rollout_id=f"late {end}", group_id="g", task={}, max_attempts=2)
    server.store.enqueue([rollout])
    key = server.keys.issue("runner", holder="a")
    with closing(HttpStore(server.url, key=key)) as runner:
        (attempt,) = runner.claim("w", lease_s=60.0 if end == "finished" else 0.01, within=[rollout.rollout_id])
        if end == "finished":
            runner.finish(attempt.attempt_id, attempt.fence, status="failed")
    with closing(HttpStore(server.url, key=server.keys.issue("runner", holder="b"))) as other:
        deadline = time.monotonic() + 60
        while not (again := other.claim("w", within=[rollout.rollout_id])) and time.monotonic() < deadline:
            pass
    for number, sender in enumerate((key, attempt.context.key), 1):
        span = span_of(attempt.attempt_id, span_id=f"{number:016x}", rollout_id=rollout.rollout_id)
        assert (_send(ask, sender, span).status_code, _send(ask, sender, span).content) == (200, b"")
        assert len(server.store.spans(attempt_ids=[attempt.attempt_id])) == number
    [others] = again
    _send(ask, key, span_of(others.attempt_id, span_id="7" * 16, rollout_id=rollout.rollout_id))
    assert server.store.spans(attempt_ids=[others.attempt_id]) == []


SECRETS = {
    "LIGHTNING_KEY": "k", "LIGHTNING_KEY_FILE": "k", "LIGHTNING_UPSTREAM_KEY": "k",
    "LIGHTNING_UPSTREAM_KEY_POLICY": "k",
    "LIGHTNING_PROVIDER_KEY": "k", "LIGHTNING_STORE": "postgresql://u:pw@db/x",
}  # fmt: skip
OTHERS = {
    "OPENAI_API_KEY": "k", "DATABASE_URL": "postgresql://u:pw@db/x", "PGPASSWORD": "pw", "AWS_SECRET_ACCESS_KEY": "k",
    "HF_TOKEN": "k", "OTEL_EXPORTER_OTLP_HEADERS": "k", "https_proxy": "http://u:pw@proxy:3128", "MYAPP_TOKEN": "k",
}  # fmt: skip
USUAL = {"PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "PYTHONPATH": ".", "HTTP_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:pa/hush@db/traces",
        "postgresql+psycopg://me:5/hush@db:5432/traces",
        "postgresql://me@db/traces?sslmode=require&password=hush",
        "postgresql://db/traces?user=me&password=hush",
    ],
)
def test_a_password_of_a_store_reaches_no_agent_and_no_record_however_it_is_written(url):
    assert without_keys({"LIGHTNING_STORE": url}) == {}
    assert allowed_environment({"LIGHTNING_STORE": url}, ["*"]) == {}
    for shown in (without_secrets(url), *without_passwords({"store": url, "data": url}).values()):
        assert "hush" not in shown
        assert shown.partition("?")[0].endswith(url.partition("?")[0].rpartition("@")[2])


@pytest.mark.parametrize(
    "url",
    [
        "http://server:8800/a@1", "docker://registry:5000/image@sha256:0", "postgresql://me@db:5432/traces", "a@b",
        "http://{HOST}:{PORT}/v1?user=me@corp", "http://host:$PORT/v1?user=me@corp",
    ],
)  # fmt: skip
def test_an_address_without_a_password_is_recorded_as_it_is(url):
    assert without_passwords({"data": url, "store": url}) == {"data": url, "store": url}


def test_an_agent_under_a_runner_gets_what_programs_need_and_what_is_named():
    environment = {**SECRETS, **OTHERS, **USUAL}
    assert allowed_environment(environment) == USUAL
    assert allowed_environment(environment, ["MYAPP_*", "OPENAI_API_KEY"]) == {
        **USUAL, "MYAPP_TOKEN": "k", "OPENAI_API_KEY": "k",
    }  # fmt: skip
    assert allowed_environment(environment, ["*"]) == {**OTHERS, **USUAL}  # keys of ours are passed on by no name
    assert without_keys(environment) == {**OTHERS, **USUAL}


AGENT = """
import json, os, pathlib


def run(task):
    def text(path):
        try:
            return pathlib.Path(path).read_bytes().decode(errors="replace")
        except OSError as error:
            return type(error).__name__

    parent = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]  # of our worker's
    found = {"environment": dict(os.environ), "cmdline": text(f"/proc/{parent}/cmdline"),
             "environ": text(f"/proc/{parent}/environ")}
    pathlib.Path(task["out"]).write_text(json.dumps(found))
    return 1.0
"""


def test_a_thief_under_a_runner_finds_no_key_around_it(server, tmp_path):
    (tmp_path / "thief.py").write_text(AGENT)
    (tmp_path / "runner.key").write_text(server.keys.issue("runner", holder="r"))
    out = tmp_path / "found.json"
    secrets = {name: f"hush-{name}" for name in (*SECRETS, *OTHERS)}
    secrets["https_proxy"] = "http://hush-u:hush-p@127.0.0.1:1"
    command = [sys.executable, "-m", "lightning_trainer.cli", "runner", "thief:run", "--server", server.url]
    command += ["--key-file", str(tmp_path / "runner.key"), "--workers", "1", "--isolate"]
    environment = {**os.environ, **secrets, "MYAPP_NAME": "named"}
    with subprocess.Popen(
        [*command, "--pass-env", "MYAPP_NAME"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as runner:
        killer = threading.Timer(120, runner.kill)
        killer.start()
        try:
            assert json.loads(runner.stdout.readline())["server"] == server.url
            server.store.enqueue([Rollout(rollout_id="thief", group_id="g", task={"out": str(out)})])
            while server.store.rollouts(rollout_ids=["thief"])[0].status in {"queued", "running"}:
                assert runner.poll() is None
        finally:
            killer.cancel()
            runner.terminate()
    assert server.store.rollouts(rollout_ids=["thief"])[0].status == "succeeded"
    found = json.loads(out.read_text())
    key = (tmp_path / "runner.key").read_text()
    assert "hush-" not in json.dumps(found["environment"])
    assert found["environment"]["MYAPP_NAME"] == "named"
    assert "runner.key" not in found["cmdline"]
    assert "--server" in found["cmdline"]  # it is the runner's
    assert key not in json.dumps(found)
    assert "LIGHTNING_KEY=" not in found["environ"]


@pytest.mark.parametrize("words", [["runner", "t"], ["--debug", "runner", "t"]])
def test_a_runner_hides_its_key_also_after_options_of_the_whole_command_line(monkeypatch, words):
    class HiddenError(Exception):
        """Raised in place of the program that starts again."""

    def hide_key(_arguments):
        raise HiddenError

    monkeypatch.setattr(undumpable, "keep_to_ourselves", lambda: None)
    monkeypatch.setattr(processes, "hide_key", hide_key)
    monkeypatch.setattr("sys.argv", ["lightning-rl", *words])
    with pytest.raises(HiddenError):
        main()


def test_a_key_file_is_taken_from_the_command_line_whichever_way_it_is_given():
    for words in (["--key-file", "f"], ["--key-file=f"]):
        assert processes._without_key_file(["lightning-rl", *words, "t"]) == (["lightning-rl", "t"], "f")
    assert processes._without_key_file(["lightning-rl", "t"]) == (["lightning-rl", "t"], None)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_process_with_keys_keeps_its_memory_to_itself():
    code = "from lightning_trainer.runner.undumpable import keep_to_ourselves as k; import os; k();"
    code += "print(os.stat('/proc/self/environ').st_uid, __import__('ctypes').CDLL(None).prctl(3, 0, 0, 0, 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]  # the file is root's, and the process can't be traced


def test_each_upstream_gets_its_own_key_and_no_other(tmp_path):
    (tmp_path / "key").write_text("from a file\n")
    policy, judge = parse_upstream("policy=http://a:1"), parse_upstream("judge-2=http://b:1")
    keys = {"LIGHTNING_UPSTREAM_KEY_JUDGE_2": "judge's"}
    assert [each.key for each in with_keys([policy, judge], [], keys)] == [None, "judge's"]
    found = with_keys([policy, judge], [f"policy={tmp_path / 'key'}"], keys)
    assert [each.key for each in found] == ["from a file", "judge's"]
    with pytest.raises(ConfigError, match="LIGHTNING_UPSTREAM_KEY_JUDGE_2"):
        with_keys([policy, judge], [], {"LIGHTNING_UPSTREAM_KEY": "one for all"})
    adapter = parse_upstream("adapter=http://a:1")
    assert {each.key for each in with_keys([policy, adapter], [], {"LIGHTNING_UPSTREAM_KEY": "one"})} == {"one"}
    for wrong in ("policy", "other=key", f"policy={tmp_path / 'missing'}"):
        with pytest.raises(ConfigError, match="--upstream-key"):
            with_keys([policy, judge], [wrong], {})
