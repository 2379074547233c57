"""What the tests of clients share: a gateway over a scripted engine. Each client has an environment of its own.

The session `clients` makes them; a test whose client is not installed is skipped.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.fakes import ByteTokenizer, FakeEngine, served


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("clients"), FakeEngine(version=3)) as running:
        yield running


class Attempt:
    """One test's attempt: its key, and what is on record of it."""

    def __init__(self, server, name):
        self._server = server
        self.name = name
        self.url = server.url
        self.key = server.key(name)

    def play(self, *answers):
        self._server.engine.play(answers)

    @property
    def samplings(self):
        return self._server.engine.samplings

    def calls(self, number):
        """The calls on record, each whole: its tokens are those of its text, with a log-probability each."""
        found = self._server.calls(self.name)
        assert len(found) == number, [call.error for call in found]
        for call in found:
            assert call.error is None
            assert call.prompt_token_ids
            assert call.policy_version == 3
            for choice in call.choices:
                assert len(choice.token_ids) == len(choice.logprobs) > 0
                assert choice.token_ids[-1] == ByteTokenizer.eos_token_id or choice.finish_reason != "stop"
        return found

    def continued(self, number=2):
        """Whether each call goes on with the tokens of the one before."""
        calls = self.calls(number)
        for one, two in pairwise(calls):
            before = one.prompt_token_ids + one.choices[0].token_ids
            assert two.prompt_token_ids[: len(before)] == before


@pytest.fixture
def attempt(request, server):
    server.engine.play(())
    server.engine.prompts.clear()
    server.engine.samplings.clear()
    return Attempt(server, f"{request.module.__name__} {request.node.name}")
