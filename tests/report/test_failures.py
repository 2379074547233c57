"""What is said of a program that failed."""

from __future__ import annotations

from lightning_trainer.report.failures import last_error, where_calls_go

CAUSE = 'Traceback (most recent call last):\n  File "transport.py", line 1, in call\nhttpx.ConnectError: no route\n\n'
DIRECT = "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
GONE = (
    CAUSE
    + DIRECT
    + '  File "client.py", line 9, in post\n    raise APIConnectionError\nopenai.APIConnectionError: Connection error.'
)
KEY = "Traceback (most recent call last):\n  File x\nopenai.AuthenticationError: Error code: 401 - wrong key"


def test_a_model_that_is_not_reached_is_one_line_with_where_to_look() -> None:
    assert last_error(GONE) == "openai.APIConnectionError: Connection error."
    environment = {"OPENAI_BASE_URL": "http://name:secret@127.0.0.1:9/v1"}
    hint = where_calls_go(GONE, environment)
    assert "OPENAI_BASE_URL is 127.0.0.1:9. Check that it is running." in hint
    assert "secret" not in hint
    assert "not set" in where_calls_go(GONE, {})


def test_langchains_own_error_of_a_model_that_is_not_reached_is_one_line_too() -> None:
    """langchain-openai 1.7 raises a class of its own, and LangGraph writes a line below it."""
    said = "langchain_openai.chat_models.base.OpenAIConnectionError: Connection error."
    text = GONE + "\n\n" + DIRECT + f"  File x\n{said}\nDuring task with name 'colour' and id '1'"
    assert last_error(text) == said
    assert "Check that it is running" in where_calls_go(text, {})
    key = KEY.replace("openai.Auth", "langchain_openai.chat_models.base.OpenAIAuth")
    assert "check OPENAI_API_KEY" in where_calls_go(key, {})


def test_an_agent_that_is_not_trained_and_reaches_no_model_is_named() -> None:
    hint = where_calls_go(GONE, {}, agents=["checker"])
    assert hint.startswith("Agents that are not trained call their own endpoint (checker): OPENAI_BASE_URL is not set")
    assert "or add them to --agents" in hint


def test_a_refused_key_names_the_key() -> None:
    assert last_error(KEY) == "openai.AuthenticationError: Error code: 401 - wrong key"
    assert "check OPENAI_API_KEY" in where_calls_go(KEY, {})


def test_other_errors_keep_the_end_of_their_traceback() -> None:
    own = GONE + "\n\n" + DIRECT + '  File "agent.py", line 3, in run\nValueError: the oven is cold'
    assert last_error(own, 2) == '  File "agent.py", line 3, in run\nValueError: the oven is cold'
    assert where_calls_go(own, {}) == ""
    assert last_error("") == ""
