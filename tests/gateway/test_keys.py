from __future__ import annotations

import json
import os
import time
from contextlib import closing

import httpx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import ConfigError
from lightning_spans.store.http import HttpStore
from lightning_trainer.cli import cli
from lightning_trainer.gateway.auth.key_files import KeyFiles
from lightning_trainer.gateway.auth.keys import KeyRefusedError, Keys
from lightning_trainer.gateway.auth.register import Register, register_of
from lightning_trainer.runner.key_file import KeyFromFile


def test_a_key_opens_what_it_was_issued_for():
    keys = Keys.fresh()
    grant = keys.check(keys.issue("attempt", rollout_id="r", attempt_id="a", fence=7, agent="writer"))
    assert (grant.scope, grant.rollout_id, grant.attempt_id) == ("attempt", "r", "a")
    assert (grant.fence, grant.agent) == (7, "writer")
    assert keys.check(keys.issue("admin")).attempt_id is None


def test_an_old_key_opens_nothing():
    keys = Keys.fresh()
    token = keys.issue("runner", expires_s=0.02)
    keys.check(token)
    time.sleep(0.05)
    with pytest.raises(KeyRefusedError, match="has expired"):
        keys.check(token)


def test_the_key_of_another_server_opens_nothing():
    with pytest.raises(KeyRefusedError):
        Keys.fresh().check(Keys.fresh().issue("admin"))


@given(position=st.integers(0, 500), letter=st.sampled_from("abcXYZ019-_."))
def test_a_key_with_any_letter_changed_opens_nothing(position: int, letter: str):
    token = _KEYS.issue("attempt", rollout_id="r", attempt_id="a", fence=1)
    position = len("lk-") + position % (len(token) - len("lk-"))
    forged = token[:position] + letter + token[position + 1 :]
    if _decoded(forged) != _decoded(token):  # the last letter of base64 may have bits that mean nothing
        with pytest.raises(KeyRefusedError):
            _KEYS.check(forged)


@given(st.text(max_size=80))
def test_no_text_at_all_makes_check_fail_otherwise_than_by_refusing(text: str):
    with pytest.raises(KeyRefusedError):
        _KEYS.check(text)


def test_the_refusal_never_tells_the_key():
    keys = Keys.fresh()
    token = keys.issue("admin")[:-3]
    with pytest.raises(KeyRefusedError) as refused:
        keys.check(token)
    assert token[5:15] not in str(refused.value)


def test_an_attempts_key_must_name_its_attempt_and_no_other_may():
    keys = Keys.fresh()
    with pytest.raises(ValueError, match="attempt"):
        keys.issue("attempt")
    with pytest.raises(ValueError, match="runner"):
        keys.issue("runner", rollout_id="r", attempt_id="a")


def test_the_secret_is_kept_for_its_owner_and_found_again(tmp_path):
    path = tmp_path / "run" / "secret"
    token = Keys.from_file(path).issue("admin")
    assert path.stat().st_mode & 0o777 == 0o600
    assert Keys.from_file(path).check(token).scope == "admin"
    assert sorted(p.name for p in path.parent.iterdir()) == [".secret.keys.lock", "secret", "secret.keys"]
    assert all(p.stat().st_mode & 0o077 == 0 for p in path.parent.iterdir())


def test_a_secret_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    Keys.from_file(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.from_file(path)


@pytest.mark.parametrize("text", ["", "not hex", "abcd"])
def test_a_broken_secret_is_refused(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="secret"):
        Keys.from_file(path)


_KEYS = Keys.fresh()


def _decoded(token: str) -> list[bytes]:
    import base64
    import binascii

    try:
        return [
            base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in token.removeprefix("lk-").split(".")
        ]
    except (binascii.Error, ValueError):
        return []


def test_a_revoked_key_opens_nothing_and_others_of_its_holder_neither(tmp_path):
    keys, register = Keys.from_file(tmp_path / "secret"), Register(register_of(tmp_path / "secret"))
    one, two, other = (keys.issue("runner", holder=holder) for holder in ("a", "a", "b"))
    grants = [keys.check(each) for each in (one, two, other)]
    assert [(key.key_id, key.scope, key.holder) for key in register.listed()] == [
        (grant.key_id, "runner", grant.holder) for grant in grants
    ]
    assert [key.key_id for key in register.revoke(grants[2].key_id)] == [grants[2].key_id]
    assert len(register.revoke("a")) == 2
    assert register.revoke("a") == register.revoke("nobody") == []
    for key in (one, two, other):
        with pytest.raises(KeyRefusedError, match=r"revoked|register"):
            Keys.from_file(tmp_path / "secret").check(key)
    assert other not in register_of(tmp_path / "secret").read_text()  # it has ids, and no keys


def test_a_key_that_another_process_issued_is_good_at_once(tmp_path):
    server = Keys.from_file(tmp_path / "secret")
    server.check(server.issue("admin"))
    assert server.check(Keys.from_file(tmp_path / "secret").issue("live")).scope == "live"


def test_keys_that_are_long_too_old_leave_the_register(tmp_path):
    keys, register = Keys.from_file(tmp_path / "secret"), Register(register_of(tmp_path / "secret"))
    keys.issue("live", expires_s=-2 * 86_400.0)
    keys.issue("live", holder="new")
    assert [key.holder for key in register.listed()] == ["new"]


@pytest.fixture
def clock(monkeypatch):
    """Unix time as the keys see it: `clock[0]` seconds later than it is."""
    ahead = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return ahead


def test_a_clock_that_is_set_ends_no_running_attempts_key(tmp_path, clock):
    keys = Keys.fresh()
    attempt = keys.issue("attempt", rollout_id="r", attempt_id="a", fence=1, expires_s=600.0)
    person = keys.issue("evaluator", expires_s=600.0)
    clock[0] = 3_600.0
    assert keys.check(attempt).attempt_id == "a"
    with pytest.raises(KeyRefusedError, match="has expired"):
        keys.check(person)


def test_keys_in_files_are_renewed_at_half_their_life(tmp_path, clock):
    keys = Keys.from_file(tmp_path / "secret")
    files = KeyFiles(keys, {"admin": tmp_path / "key", "runner": tmp_path / "key.runner"})
    files.write()
    assert files.paths == {"key_file": str(tmp_path / "key"), "runner_key_file": str(tmp_path / "key.runner")}
    first = (tmp_path / "key.runner").read_text()
    clock[0] = 14 * 86_400.0
    files.renew()
    assert (tmp_path / "key.runner").read_text() == first
    clock[0] = 15 * 86_400.0 + 60
    files.renew()
    second = (tmp_path / "key.runner").read_text()
    assert second != first
    assert keys.check(first.strip()).scope == keys.check(second.strip()).scope == "runner"  # as long again to read it
    assert files.status()["status"] == "ok"
    clock[0] = 76 * 86_400.0  # it slept longer than a key lives
    assert files.status()["status"] == "error"
    files.renew()
    assert keys.check((tmp_path / "key").read_text().strip()).scope == "admin"
    assert files.status()["status"] == "ok"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_key_of_a_file_that_is_revoked_is_replaced(tmp_path):
    keys = Keys.from_file(tmp_path / "secret")
    files = KeyFiles(keys, {"runner": tmp_path / "key.runner"})
    files.write()
    stolen = (tmp_path / "key.runner").read_text()
    Register(register_of(tmp_path / "secret")).revoke("runner")
    keys._register._looked_s = float("-inf")  # a second later
    files.renew()
    assert keys.check((tmp_path / "key.runner").read_text().strip()).holder == "runner"
    with pytest.raises(KeyRefusedError):
        keys.check(stolen.strip())


def test_a_file_that_can_not_be_renewed_is_told_and_tried_again(tmp_path, clock):
    files = KeyFiles(Keys.from_file(tmp_path / "secret"), {"runner": tmp_path / "folder" / "key"})
    files.write()
    (tmp_path / "folder" / "key").unlink()
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("in the way")
    clock[0] = 16 * 86_400.0
    files.renew()
    assert files.status()["status"] == "error"
    (tmp_path / "folder").unlink()
    clock[0] += 120
    files.renew()
    assert files.status()["status"] == "ok"


def test_a_register_that_can_not_be_read_ends_no_key(tmp_path):
    keys, path = Keys.from_file(tmp_path / "secret"), register_of(tmp_path / "secret")
    files = KeyFiles(keys, {"runner": tmp_path / "key.runner"})
    files.write()
    key = (tmp_path / "key.runner").read_text()
    path.rename(tmp_path / "aside")
    path.mkdir()
    keys._register._looked_s = float("-inf")  # a second later
    files.renew()
    assert keys.check(key.strip()).scope == "runner"
    assert str(path) in files.status()["error"]
    path.rmdir()
    (tmp_path / "aside").rename(path)
    keys._register._looked_s = float("-inf")
    keys.check(key.strip())
    assert files.status()["status"] == "ok"
    assert (tmp_path / "key.runner").read_text() == key


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files to others")
def test_a_register_that_root_changes_keeps_its_owner(tmp_path):
    keys, path = Keys.from_file(tmp_path / "secret"), register_of(tmp_path / "secret")
    keys.issue("admin")
    os.chown(path, 65_534, 65_534)
    path.chmod(0o640)
    keys.issue("live")
    kept = path.stat()
    assert (kept.st_uid, kept.st_gid, kept.st_mode & 0o777) == (65_534, 65_534, 0o640)
    assert len(Register(path).listed()) == 2


def test_a_runner_reads_its_key_again_when_it_is_refused(tmp_path):
    path, seen = tmp_path / "key", []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        if seen[-1] == "Bearer old":
            path.write_text("new\n")
        return httpx.Response(401 if seen[-1] == "Bearer old" else 200, json={"lost": []})

    path.write_text("old\n")
    with closing(HttpStore("http://x", transport=httpx.MockTransport(answer), auth=KeyFromFile(path))) as store:
        assert store.heartbeat([]) == []
        assert seen == ["Bearer old", "Bearer new"]
        path.write_text("newer\n")
        store.heartbeat([])
        path.unlink()
        store.heartbeat([])
    assert seen[2:] == ["Bearer newer"] * 2


def test_keys_are_made_listed_and_revoked_on_the_command_line(tmp_path):
    file = tmp_path / "lightning.key"
    keys = Keys.from_file(tmp_path / "lightning.key.secret")

    def call(*words: str) -> str:
        done = CliRunner().invoke(cli, ["key", *words, "--key-file", str(file)])
        assert done.exit_code == 0, done.output
        return done.output

    runner = keys.check(call("runner", "--name", "gpu-1").strip())
    assert (runner.scope, runner.holder) == ("runner", "gpu-1")
    assert keys.check(call("runner").strip()).holder != keys.check(call("runner").strip()).holder
    listed = [json.loads(line) for line in call("list", "--json").splitlines()]
    assert {"id": runner.key_id, "scope": "runner", "holder": "gpu-1", "state": "good"}.items() <= listed[0].items()
    assert "gpu-1" in call("list")
    assert runner.key_id in call("revoke", "gpu-1")
    with pytest.raises(KeyRefusedError):
        Keys.from_file(tmp_path / "lightning.key.secret").check_grant(runner)
    assert json.loads(call("list", "--json").splitlines()[0])["state"].startswith("revoked")
