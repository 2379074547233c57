from __future__ import annotations

import gc
import types
import weakref

import pytest

from lightning_spans.record.instrument.binding import attaches
from lightning_spans.record.instrument.patches import Undo, clear, put_back, replace, replace_in_subclasses


def louder(original):
    def wrapper(*args):
        return original(*args) + "!"

    return wrapper


def a_family():
    class Base:
        pass

    class Child(Base):
        def say(self):
            return "child"

        @classmethod
        def name(cls):
            return cls.__name__

        @staticmethod
        def word():
            return "word"

    return Base, Child


@pytest.mark.parametrize(("name", "said"), [("say", "child!"), ("name", "Child!"), ("word", "word!")])
def test_a_patch_keeps_the_kind_of_method_and_its_undo_puts_back_the_very_one(name, said):
    _, child = a_family()
    before = vars(child)[name]
    undo = replace(child, name, louder)
    assert getattr(child(), name)() == said
    assert type(vars(child)[name]) is type(before)
    assert getattr(child, name).__name__ == name
    undo()
    assert vars(child)[name] is before


def test_a_function_of_a_module_is_patched_as_well():
    module = types.ModuleType("words")
    module.say = lambda: "word"
    undo = replace(module, "say", louder)
    assert module.say() == "word!"
    undo()
    assert module.say() == "word"


def test_an_attribute_that_the_class_only_inherits_is_refused():
    _, child = a_family()

    class Grandchild(child):
        pass

    with pytest.raises(AttributeError, match="Grandchild has no say of its own"):
        replace(Grandchild, "say", louder)


def test_a_later_patch_of_somebody_else_survives_the_undo():
    _, child = a_family()
    undo = replace(child, "say", louder)
    ours = child.say
    child.say = lambda self: ours(self) + "?"
    undo()
    assert child().say() == "child!?"


class Proxy:
    """What wrapt puts around a function: it passes as the function, and calls it through `__wrapped__`."""

    __wrapped__ = None

    def __init__(self, wrapped):
        self.__wrapped__ = wrapped

    def __call__(self, *args):
        return self.__wrapped__(*args) + "?"

    def __get__(self, instance, owner):
        return types.MethodType(self, instance)

    def __eq__(self, other):
        return self.__wrapped__ == other

    def __hash__(self):
        return hash(self.__wrapped__)


def test_where_somebody_took_our_patch_out_it_is_put_back():
    base, child = a_family()
    before = child.say
    undo = replace_in_subclasses(base, "say", louder)
    child.say = Proxy(child.say)
    assert not put_back(base, "say", louder)  # ours is under his
    child.say = before
    undo.add(again := put_back(base, "say", louder))
    assert again
    assert child().say() == "child!"
    undo()
    assert child.say is before


@pytest.mark.parametrize("found", ["in its own place", "in a subclass's", "under a proxy"])
def test_a_patch_that_is_undone_is_taken_out_where_somebody_kept_it(found):
    base, child = a_family()

    class Grandchild(child):
        pass

    before = child.say
    undo = replace(child, "say", louder)
    kept = child.say
    if found == "under a proxy":
        Grandchild.say = Proxy(kept)
    undo()
    if found == "in its own place":
        child.say = kept
    if found == "in a subclass's":
        Grandchild.say = kept
    clear(base, "say")
    assert child.say is before
    assert Grandchild().say() == ("child?" if found == "under a proxy" else "child")
    assert ("say" in vars(Grandchild)) is (found == "under a proxy")


def test_a_wrap_may_leave_a_function_alone():
    _, child = a_family()
    before = child.say
    replace(child, "say", lambda original: original)()
    assert child.say is before
    assert not hasattr(child.say, "__wrapped__")


def test_subclasses_are_patched_also_those_that_come_later():
    base, child = a_family()
    undo = Undo()
    undo.add(replace_in_subclasses(base, "say", louder))
    undo.add(replace_in_subclasses(base, "shout", louder))

    class Later(child):
        def say(self):
            return super().say() + "later"

        def shout(self):
            return "aloud"

    assert (child().say(), Later().say(), Later().shout()) == ("child!", "child!later!", "aloud!")
    undo()
    assert (child().say(), Later().say(), Later().shout()) == ("child", "childlater", "aloud")
    assert "__init_subclass__" not in vars(base)


def test_a_patched_class_is_freed_when_nothing_else_holds_it():
    base, _ = a_family()

    def defined_in_a_run():
        class Later(base):
            def say(self):
                return f"{super().__str__()} later"  # `super` makes the method hold its class

            @classmethod
            def shout(cls):
                return "aloud"

        return weakref.ref(Later)

    undo = Undo()
    undo.add(replace_in_subclasses(base, "say", louder))
    undo.add(replace_in_subclasses(base, "shout", louder))
    later = defined_in_a_run()
    gc.collect()
    assert later() is None
    undo()


def test_a_base_that_watches_its_subclasses_still_does():
    seen = []

    class Base:
        def __init_subclass__(cls, **options):
            seen.append((cls.__name__, options))

    before = vars(Base)["__init_subclass__"]
    undo = replace_in_subclasses(Base, "say", louder)

    class Later(Base, flavour="sweet"):
        def say(self):
            return "later"

    assert seen == [("Later", {"flavour": "sweet"})]
    assert Later().say() == "later!"
    undo()
    assert vars(Base)["__init_subclass__"] is before


def test_what_is_undone_twice_is_undone_once_and_last_first():
    steps = []
    undo = Undo()
    undo.add(lambda: steps.append("first"))
    undo.add(lambda: steps.append("second"))
    undo()
    undo()
    assert steps == ["second", "first"]


def test_a_step_that_fails_keeps_no_other_from_being_undone(caplog):
    steps = []
    undo = Undo()
    undo.add(lambda: steps.append("first"))
    undo.add(lambda: 1 / 0)
    undo()
    assert steps == ["first"]
    assert "may not be undone" in caplog.text


def hook_of(child, more):
    @attaches("far-away")
    def lightning_attach(recorder):
        """Bind it."""
        yield replace(child, "say", louder)
        yield more(recorder)

    return lightning_attach


def test_a_plugins_hook_binds_its_own_framework_alone_and_undoes_all():
    _, child = a_family()
    undone = []
    attach = hook_of(child, lambda recorder: lambda: undone.append(recorder))
    assert attach(framework="near", recorder="r") is None
    assert child().say() == "child"
    undo = attach(framework="far-away", recorder="r")
    assert child().say() == "child!"
    undo()
    assert child().say() == "child"
    assert undone == ["r"]


def test_a_plugin_that_can_not_be_bound_whole_leaves_nothing_patched():
    _, child = a_family()
    before = vars(child)["say"]
    with pytest.raises(ZeroDivisionError):
        hook_of(child, lambda _: 1 / 0)(framework="far-away", recorder=None)
    assert vars(child)["say"] is before
