from __future__ import annotations

import logging

import pytest

from lightning_spans import hookimpl, hooks
from lightning_spans.errors import AttachError


@pytest.fixture
def registered():
    names: list[str] = []

    def add(plugin: object, name: str) -> None:
        hooks.register(plugin, name)
        names.append(name)

    yield add
    for name in names:
        hooks.unregister(name)


def test_a_plugin_that_is_not_installed_is_a_clear_error():
    with pytest.raises(AttachError, match="is lightning-langgain installed"):
        hooks.load("langgain")


def test_what_is_named_as_installed_can_be_attached():
    assert "trainer" in hooks.installed()
    with pytest.raises(AttachError, match="Plugins installed") as told:
        hooks.load("langgain")
    assert "trainer" not in str(told.value)


def test_a_misspelt_hook_fails_loudly_and_leaves_nothing_behind(registered):
    class Misspelt:
        @hookimpl
        def lightning_atach(self, framework, recorder):
            return None

    with pytest.raises(AttachError, match="lightning_atach"):
        registered(Misspelt(), "misspelt")
    assert not hooks.manager().has_plugin("misspelt")


def test_one_listener_that_raises_starves_no_other(registered, caplog):
    heard = []

    class Listener:
        def __init__(self, name, *, broken=False):
            self.name, self.broken = name, broken

        @hookimpl
        def lightning_span_ended(self, span):
            if self.broken:
                raise RuntimeError("broken listener")
            heard.append(self.name)

    registered(Listener("first"), "first")
    registered(Listener("second", broken=True), "second")
    registered(Listener("third"), "third")
    with caplog.at_level(logging.ERROR, logger="lightning_spans"):
        hooks.notify("lightning_span_ended", span=None)
    assert sorted(heard) == ["first", "third"]
    assert "second" in caplog.text


def test_answers_of_all_listeners_are_kept(registered):
    class Rule:
        def __init__(self, value):
            self.value = value

        @hookimpl
        def lightning_rewards(self, trace, transitions):
            return self.value

    registered(Rule(["a"]), "one")
    registered(Rule(None), "two")
    registered(Rule(["b"]), "three")
    assert sorted(hooks.notify("lightning_rewards", trace=None, transitions=[])) == [["a"], ["b"]]
