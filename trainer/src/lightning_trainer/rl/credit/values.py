"""The result of a credit assigner: values, and what each of them is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from lightning_spans.schema.rewards import Reward

Discount: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""A discount factor per turn; its range is checked when a configuration is created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One comparison that contributes to the advantage of a call.

    Attributes:
        values: (M,) what is compared, one for each transition; NaN if no reward concerns the call.
        places: (M,) only calls of one place, and of one agent, are compared; None: all calls of the agent.
        weight: of this comparison in the sum; or (M,) one for each transition.
        by_step: whether every call counts once; otherwise every attempt does, shared by its calls of one place.
    """

    values: Sequence[float]
    places: Sequence[str] | None = None
    weight: float | Sequence[float] = 1.0
    by_step: bool = False


class CreditedValues(list[float]):
    """One value for each transition, as any assigner returns, with what they are compared with.

    Attributes:
        levels: the comparisons whose weighted sum is the advantage; the first contains the values themselves.
        lost: rewards that the assigner gave to nobody.
    """

    def __init__(
        self,
        values: Sequence[float],
        *,
        places: Sequence[str] | None = None,
        more: Iterable[Level] = (),
        weight: float | Sequence[float] = 1.0,
        lost: Iterable[Reward] = (),
    ) -> None:
        super().__init__(values)
        self.levels: tuple[Level, ...] = (Level(values=tuple(values), places=places, weight=weight), *more)
        self.lost = tuple(lost)


def levels_of(values: Sequence[float]) -> tuple[Level, ...]:
    """Return the comparisons of an assigner's result; a plain list is one, over all calls of an agent."""
    return values.levels if isinstance(values, CreditedValues) else (Level(values=values),)


def places_of(values: Sequence[float]) -> Sequence[str] | None:
    """Return the places by which the values themselves are compared; None: only by agent."""
    return levels_of(values)[0].places


def lost_in(values: Sequence[float]) -> tuple[Reward, ...]:
    """Return the rewards that an assigner reports as given to nobody."""
    return values.lost if isinstance(values, CreditedValues) else ()
