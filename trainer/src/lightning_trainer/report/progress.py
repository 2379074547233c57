"""What a person sees during training: a live panel on a terminal, otherwise one line per step. Always on stderr."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from lightning_trainer.report.speed.waits import longest_wait
from lightning_trainer.report.terminal import decimal, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

IMPORTING: Final = "importing the agent"  # may still reject the program: then the error is the only line printed
ON_VERL: Final = "rollouts and learning on verl"  # which cannot stop between two steps
_MEASURING: Final = (
    "samples of", "tasks under a candidate", "a proposal of the reflection model", "attacks and rollouts", "replays",
    "continuations",
)  # fmt: skip
_CUT: Final = ("starting verl", "rollouts", "validation", "asking the teacher's server", *_MEASURING)  # cut on a stop
_UNCHANGED: Final = ("starting", IMPORTING, "loading", "writing", "judging samples", *_MEASURING)  # without new weights
_LINE_S: Final = 30.0  # seconds between lines of a long wait, without a terminal
_BARS = " ▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Callback for the progress of the training loop."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Report the current phase and its progress."""
        ...

    def begin(self, step: int, steps: int) -> None:
        """Report the first step and the number of steps, once they are known."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the numbers of a finished step."""
        ...

    def note(self, text: str) -> None:
        """Report something worth keeping on the screen."""
        ...

    def alarms(self, texts: Sequence[str]) -> None:
        """Report the alarms that are active now; they replace the earlier ones."""
        ...

    def stopping(self) -> None:
        """Report that a stop was requested, and what must end first. Called from a signal handler."""
        ...


class Silent:
    """Shows nothing: for programs that call `train()`."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Show nothing."""

    def begin(self, step: int, steps: int) -> None:
        """Show nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def alarms(self, texts: Sequence[str]) -> None:
        """Show nothing."""

    def stopping(self) -> None:
        """Show nothing."""


class ProgressDisplay:
    """Shows progress on stderr while its ``with`` block runs, from the first report on.

    Nothing is shown before: options are still being checked, and a rejected run never began. Without a terminal, each
    long wait prints one line until there are lines of steps, and one more every half minute.

    Args:
        title: the first line: what is trained on what.
    """

    def __init__(self, title: str) -> None:
        from rich.console import Console

        self._console: Console = Console(stderr=True)
        self._step = self._steps = 0
        self._title = title
        self._began = self._last = time.monotonic()
        self._rewards: list[float] = []
        self._metrics: Mapping[str, float] = {}
        self._phase = ("starting", 0, 0)
        self._alarms: Sequence[str] = ()
        self._live: Live | None = None
        self._open = self._shown = False
        self._told: set[str] = set()  # phases already printed, without a terminal

    def __enter__(self) -> ProgressDisplay:
        self._open = True
        return self

    def _show(self) -> None:
        """Start the panel, or print the title, once."""
        from rich.live import Live

        if self._shown or not self._open:
            return
        self._shown = True
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=2)
            self._live.start()
        else:
            self._console.print(self._title, highlight=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Show the current phase and its progress."""
        self._phase = (name, done, total)
        if self._console.is_terminal:
            self._show()
        elif name not in self._told and name != IMPORTING and not self._rewards:
            self._told.add(name)
            self.note(f"{name}{f': {total}' if total else ''} ...")
        elif 0 < done < total and time.monotonic() - self._last > _LINE_S:
            self.note(f"{name}: {done} of {total} ({duration(time.monotonic() - self._began)})")

    def begin(self, step: int, steps: int) -> None:
        """Set the first step and the number of steps, once they are known."""
        self._step, self._steps = step, steps
        self._began = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a finished step."""
        self._step = step + 1
        self._rewards.append(metrics.get("reward", 0.0))
        self._metrics = metrics
        if self._live is None:
            self.note(f"step {step + 1}/{self._steps}  {one_line(metrics)}")

    def note(self, text: str) -> None:
        """Print something worth keeping on the screen."""
        self._show()
        self._last = time.monotonic()
        self._console.print(printable(text, lines=True), highlight=False, markup=False, soft_wrap=True)

    def alarms(self, texts: Sequence[str]) -> None:
        """Show the alarms that are active now; they replace the earlier ones."""
        for text in texts:
            if self._live is None and text not in self._alarms:
                self.note(f"ALARM: {text}")
        self._alarms = texts

    def stopping(self) -> None:
        """Print that a stop was requested, and what must end first. Called from a signal handler."""
        name, done, total = self._phase
        cut = name.startswith(_CUT)
        place = f" ({done} of {total})" if cut else f" (step {done + 1} of {total})"
        text = f"\nstopping: {name}{place if total else ''} {'will be cancelled' if cut else 'must finish first'}"
        lost = "everything after the last checkpoint (or the whole run, if there is none yet)"
        if name == ON_VERL:
            text += f", which loses {lost}"
        elif not name.startswith((*_UNCHANGED, "saving")):
            text += ", then the weights are saved"
        text += ". Press Ctrl-C again to quit now"
        if not name.startswith((*_UNCHANGED, ON_VERL)):
            text += f" and lose {lost}"
        os.write(2, f"{text}.\n".encode())  # not through the console, which may be in the middle of a line

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        name, done, total = self._phase
        elapsed = time.monotonic() - self._began
        taken = len(self._rewards)
        to_go = self._steps - self._step
        left = f", about {duration(elapsed / taken * to_go)} left" if taken and to_go > 0 else ""
        place = f"step {min(self._step + 1, self._steps)} of {self._steps}   " if self._steps else ""
        lines: list[RenderableType] = [
            Text(f"{place}{duration(elapsed)}{left}"),
            Text(f"{name}{f' {done} of {total}' if total else ''}"),
            Text(bar(done, total), style="green"),
        ]
        if self._rewards:
            lines.append(Text(f"reward {decimal(self._rewards[-1])}  {sparkline(self._rewards)}"))
            rest = {name: value for name, value in self._metrics.items() if name != "reward"}
            lines.append(Text(one_line(rest), style="dim"))
        lines += [Text(text, style="bold yellow") for text in self._alarms]
        return Panel(Group(*lines), title=self._title, title_align="left")


def one_line(metrics: Mapping[str, float]) -> str:
    """Return the most informative numbers in one line; missing ones are left out."""
    shown = {
        "failed": ".0f",
        "loss": ".4f",
        "grad_norm": ".2f",
        "clip_fraction": ".3f",
        "logprob_gap": ".4f",
        "entropy": ".2f",
        "calls_trained": ".0f",
        "calls_unjoined": ".0f",
        "rows": ".0f",
        "seconds": ".1f",
    }
    agents = [
        f"{name.removeprefix('reward/')} {decimal(metrics[name])}" for name in metrics if name.startswith("reward/")
    ]
    earned = [f"reward {decimal(metrics['reward'])}"] if "reward" in metrics else []
    parts = [f"{name} {metrics[name]:{form}}" for name, form in shown.items() if name in metrics]
    longest = longest_wait(metrics)
    waited = [] if longest is None else [f"waited for {longest[0]} {longest[1]:.1f}"]
    return printable("  ".join([*earned, *agents, *parts, *waited]))


def bar(done: int, total: int, width: int = 60) -> str:
    """Return a progress bar; empty if the total is not known."""
    return "━" * round(width * min(done, total) / total) if total else ""


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Return the newest values as bars from the lowest to the highest of all; a gap for each that is not finite."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0

    def drawn(value: float) -> str:
        return _BARS[1 + round((value - low) / span * (len(_BARS) - 2))] if math.isfinite(value) else _BARS[0]

    return "".join(drawn(value) for value in values[-width:])


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
