"""Attacks with stop strings, which are looked for after each token of an answer."""

from __future__ import annotations

import pytest

from lightning_trainer.gateway.request.chat_request import MAX_STOP_CHARACTERS, MAX_STOPS
from support.gateway.surfaces import SURFACES

NAMED = {"/v1/chat/completions": "stop", "/v1/completions": "stop", "/v1/messages": "stop_sequences"}


@pytest.mark.parametrize("path", NAMED)
def test_more_stop_strings_than_can_be_looked_for_are_refused(ask, server, path):
    def asked(stops):
        body = {**SURFACES[path]("hi"), NAMED[path]: stops}
        return ask("POST", path, server.key(f"stops {path}"), json=body).status_code

    assert asked([f"{at} no such text" for at in range(MAX_STOPS)]) == 200
    assert asked(["x" * MAX_STOP_CHARACTERS]) == 200
    assert asked([f"{at} no such text" for at in range(MAX_STOPS + 1)]) == 400
    assert asked(["x" * (MAX_STOP_CHARACTERS + 1)]) == 400
