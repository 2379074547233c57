"""Creates a plugin's hook from its patches: bound in order, undone in reverse, and undone if one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from lightning_spans.hooks import hookimpl
from lightning_spans.record.instrument.patches import Undo

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

Bind: TypeAlias = "Callable[[Recorder], Iterator[Callable[[], None]]]"
"""Changes one thing after the other in a framework, and yields what restores each."""


def attaches(name: str) -> Callable[[Bind], Callable[..., Callable[[], None] | None]]:
    """Create a plugin's hook `lightning_attach` from a generator.

    Args:
        name: the framework's name in `attach()`.
    """

    def hook_of(bind: Bind) -> Callable[..., Callable[[], None] | None]:
        @hookimpl
        def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
            return apply_bindings(bind, recorder) if framework == name else None

        lightning_attach.__doc__ = bind.__doc__
        return lightning_attach

    return hook_of


def apply_bindings(bind: Bind, recorder: Recorder) -> Undo:
    """Make all changes of a generator, and return what restores them.

    Raises:
        Exception: raised by the generator; its changes so far are restored.
    """
    undo = Undo()
    try:
        for step in bind(recorder):
            undo.add(step)
    except BaseException:
        undo()
        raise
    return undo
