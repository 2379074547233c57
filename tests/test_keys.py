from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import ConfigError
from lightning_trainer.server.keys import KeyRefusedError, Keys


def test_a_key_opens_what_it_was_issued_for():
    keys = Keys.fresh()
    grant = keys.check(keys.issue("attempt", rollout_id="r", attempt_id="a", agent="writer"))
    assert (grant.scope, grant.rollout_id, grant.attempt_id, grant.agent) == ("attempt", "r", "a", "writer")
    assert keys.check(keys.issue("admin")).attempt_id is None


def test_an_old_key_opens_nothing():
    keys = Keys.fresh()
    token = keys.issue("runner", expires_s=0.02)
    keys.check(token)
    time.sleep(0.05)
    with pytest.raises(KeyRefusedError, match="too old"):
        keys.check(token)


def test_the_key_of_another_server_opens_nothing():
    with pytest.raises(KeyRefusedError):
        Keys.fresh().check(Keys.fresh().issue("admin"))


@given(position=st.integers(0, 500), letter=st.sampled_from("abcXYZ019-_."))
def test_a_key_with_any_letter_changed_opens_nothing(position: int, letter: str):
    token = _KEYS.issue("attempt", rollout_id="r", attempt_id="a")
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
    assert [p.name for p in path.parent.iterdir()] == ["secret"]


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
