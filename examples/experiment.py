"""Supervised learning, then RL, on one of the examples on real data, with held-out figures before, between and after.

`python examples/experiment.py NAME [--seeds 0,1,2] [--quick] [--out FOLDER]`; NAME is a folder beside this file that
has an `experiment.toml`: options of each stage, `[quick]` ones, `[variables]` of the program's environment, and in
`[serve]` a model for its agents that are not trained, or `sft` for the one that SFT makes. Each stage is one command of
`lightning-rl`, printed before it runs. It is not run again where its result is there, in a folder of the same options,
and one that was stopped midway goes on where it stopped; of such a stage only the cost of the part that ended it is
known, and the table says so. The untrained model, which is the same for all seeds, is measured with seed 0 alone. The
table goes between marks in the folder's README, with the seeds that were measured before; what was measured with other
options has a table of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
sys.path.insert(0, str(EXAMPLES))

from curves import hash_options, merge, publish, tables  # noqa: E402

MODEL = "smollm2-135m"
LOCAL = {"folder", "evaluated", "against"}  # where something lay on the machine that measured
NOTHING_TO_LEARN = 4  # exit status of `lightning-rl train`
# with --resume, once this is in the folder
GOES_ON = {"eval": ("eval.json", ["--json"]), "sft": ("learning.json", []), "train": ("checkpoint", [])}
AFTER_SFT = "sft"  # as the model that is served to others: the one that SFT makes


class Experiment:
    """The stages of one example with one seed.

    Args:
        name: of the example's folder.
        seed: of SFT and RL; what is held out is the same for all.
        out: folder for data, runs and results.
        quick: a small piece of each stage, to see that it works.
    """

    def __init__(self, name: str, seed: int, out: Path, *, quick: bool) -> None:
        self.here = EXAMPLES / name
        options = tomllib.loads((self.here / "experiment.toml").read_text())
        quickly = options.pop("quick", {})
        small = quickly if quick else {}
        self._variables, self._serve = options.pop("variables", {}), options.pop("serve", {}).get("model")
        for stage in {*options, *small}:
            if "steps" in small.get(stage, {}):  # another way to say how long
                options[stage].pop("epochs", None)
        self._options = {stage: {**options.get(stage, {}), **small.get(stage, {})} for stage in {*options, *small}}
        self._seed, self._out = seed, out / f"seed-{seed}"
        self._data = out / "data"
        self._environment = dict(os.environ)
        self._alone = True  # nothing is served beside the policy
        self._passing = {0, NOTHING_TO_LEARN} if quick else {0}  # in so small a piece all rewards may be equal

    def run(self) -> list[dict[str, Any]]:
        """Return what each stage measured: held-out reward with its interval, and what the stage cost.

        Raises:
            SystemExit: a stage failed, or the folder holds stages of other options.
        """
        self._data.mkdir(parents=True, exist_ok=True)
        self._out.mkdir(parents=True, exist_ok=True)
        self._hold()
        with self._others(None if self._serve == AFTER_SFT else self._serve):
            if not (self._data / "sft.jsonl").exists():
                flags = _flags(self._options.get("data", {}))
                self._call("data", [sys.executable, "data.py", "--out", self._data, *flags])
            untrained = [self._evaluated("untrained", MODEL)] if self._seed == 0 else []
            sft = self._learned("sft", ["sft", self._data / "sft.jsonl", "--model", MODEL])
            with self._others(sft["checkpoint"] if self._serve == AFTER_SFT else None):
                return [*untrained, *self._compared(sft)]

    def _hold(self) -> None:
        """Keep the options beside the stages that run with them, and refuse others."""
        kept = self._data.parent / "options.json"
        asked = json.dumps({"serve": self._serve, "variables": self._variables, **self._options}, sort_keys=True)
        if kept.exists() and kept.read_text() != asked:
            raise SystemExit(f"{kept.parent} has stages of other options: name another folder with --out.")
        kept.write_text(asked)

    def _compared(self, sft: Mapping[str, Any]) -> list[dict[str, Any]]:
        after_sft = self._evaluated("after SFT", sft["checkpoint"], sft)
        target = ["train", self._target("train"), "--data", self._data / "train.jsonl", "--model", sft["checkpoint"]]
        rl = self._learned("train", target)
        learned = rl.get("checkpoint", sft["checkpoint"])
        return [after_sft, self._evaluated("after RL", learned, rl, against=after_sft["folder"])]

    @contextmanager
    def _others(self, model: str | None) -> Iterator[None]:
        """Serve a model to the agents that are not trained, and tell the program of it; None: serve none."""
        if model is None:
            self._tell()
            yield
            return
        with serve_model(model) as where:
            self._alone = False
            self._tell(**where)
            yield

    def _tell(self, **places: str) -> None:
        """Set the program's environment, as far as what it names is known."""
        known = {"data": str(self._data), **places}
        for name, value in self._variables.items():
            with suppress(KeyError):
                self._environment[name] = value.format_map(known)

    def _target(self, stage: str) -> str:
        return str(self._options.get(stage, {}).get("target", "agent:run"))

    def _flags(self, stage: str, *, without: str = "target") -> list[str]:
        options = self._options.get(stage, {})
        return _flags({name: value for name, value in options.items() if name not in {"target", without}})

    def _learned(self, stage: str, command: list[Any]) -> dict[str, Any]:
        folder = self._out / stage
        asked = [*command, *self._flags(stage), "--seed", self._seed]
        return {**self._stage(f"{self._seed} {stage}", asked, folder), "tokens": _tokens(folder)}

    def _evaluated(
        self, stage: str, model: str, cost: Mapping[str, Any] | None = None, against: str | None = None
    ) -> dict[str, Any]:
        folder = self._out / stage.replace(" ", "-")
        flags = self._flags("eval", without="agents" if self._serve == AFTER_SFT and self._alone else "target")
        asked = ["eval", self._target("eval"), "--data", self._data / "val.jsonl", "--model", model, "--json"]
        beside = ["--against", against] if against else []
        found = self._stage(f"{self._seed} {stage}", [*asked, *flags, *beside], folder)
        costs = {name: cost[name] if cost else 0.0 for name in ("seconds", "cpu_seconds", "tokens")}
        resumed = {"resumed": True} if cost and cost.get("resumed") else {}
        return {"stage": stage, "seed": self._seed, "folder": str(folder), "found": found, **costs, **resumed}

    def _stage(self, name: str, asked: list[Any], folder: Path) -> dict[str, Any]:
        """Run a command of `lightning-rl`, or go on with what it left in its folder when it was stopped."""
        kept, options = GOES_ON.get(asked[0], ("", []))
        if kept and (folder / kept).exists():
            result = self._call(name, ["lightning-rl", asked[0], "--resume", folder, *options], resumed=True)
        else:
            if folder.exists() and not self._kept(name).exists():
                shutil.rmtree(folder)
            result = self._call(name, ["lightning-rl", *asked, "--out", folder])
        return result

    def _kept(self, name: str) -> Path:
        return self._out / f"{name.replace(' ', '-')}.json"

    def _call(self, name: str, command: list[Any], *, resumed: bool = False) -> dict[str, Any]:
        """Run a command, unless it was run before, and return its last line and what it cost."""
        if (kept := self._kept(name)).exists():
            result: dict[str, Any] = json.loads(kept.read_text())
            return result
        words = [str(word) for word in command]
        print("$", " ".join(words), flush=True)
        began, cpu = time.monotonic(), _cpu_s()
        status, said = self._ended(words)
        if status not in self._passing:
            raise SystemExit(f"{words[1]} ended with {status}: {said[-2000:]}")
        last = said.strip().splitlines()[-1] if said.strip() else "{}"
        told = json.loads(last) if last.startswith("{") else {}
        result = {**told, "seconds": time.monotonic() - began, "cpu_seconds": _cpu_s() - cpu}
        if resumed:
            result["resumed"] = True
        kept.write_text(json.dumps(result))
        return result

    def _ended(self, words: list[str]) -> tuple[int, str]:
        """Run a command to its end, and return its exit status and what it printed."""
        with subprocess.Popen(
            words, cwd=self.here, env=self._environment, stdout=subprocess.PIPE, text=True
        ) as running:
            try:
                said, _ = running.communicate()
            except KeyboardInterrupt:  # which it got, too: it keeps where it stands
                running.wait()
                raise
        return running.returncode, said


@contextmanager
def serve_model(model: str) -> Iterator[dict[str, str]]:
    """Serve a model to the agents that are not trained, and yield its base URL and its key."""
    words = ["lightning-rl", "serve", model]
    print("$", " ".join(words), flush=True)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if not (line := server.stdout.readline()):
                raise SystemExit(f"{model} is not served: see above.")
            told = json.loads(line)
            yield {"url": f"{told['url']}/v1", "key": Path(told["key_file"]).read_text().strip()}
        finally:
            server.terminate()


def _flags(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _tokens(run: Path) -> int:
    """Count the tokens that a run sampled, or, where it sampled none, those that it learned from."""
    path = run / "metrics.jsonl"  # there is none where a small piece had nothing to learn
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line for line in lines if line["kind"] == "train"]
    return round(sum(step.get("tokens_generated", step["tokens"]) for step in steps))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def keep(folder: Path, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write what was measured to measured.jsonl, in place of the same seeds with the same options; return all rows."""
    options = hash_options(folder / "experiment.toml")
    rows = [{**_without_places(row), "options": options, "found": _without_places(row["found"])} for row in measured]
    return merge(folder / "measured.jsonl", rows, "seed", "options")


def _without_places(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in LOCAL}


def table(measured: list[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    head = (
        "| | seed | held out, 95 % | tasks | samples of each | more than after SFT, 95 %"
        " | tokens: SFT learned, RL sampled | CPU s | wall s |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in measured:
        found = row["found"]
        mean = _interval(found["mean"], found["low"], found["high"])
        compared = "difference" in found
        beside = _interval(*(found[f"difference{end}"] for end in ("", "_low", "_high"))) if compared else ""
        least = "over " if row.get("resumed") else ""
        costs = f"{least}{row['cpu_seconds']:.0f} | {least}{row['seconds']:.0f}" if row["seconds"] else " | "
        tokens = f"{row['tokens']:,}" if row.get("tokens") else ""  # rows of before have none
        lines.append(
            f"| {row['stage']} | {row['seed']} | {mean} | {found['tasks']} | {found['samples']} | {beside} | {tokens} |"
            f" {costs} |"
        )
    return "\n".join(lines)


def _interval(mean: float, low: float | None, high: float | None) -> str:
    return f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None else "")


def main() -> None:
    """Measure what is asked for, and publish the table, unless it was only a quick look."""
    names = sorted(path.parent.name for path in EXAMPLES.glob("*/experiment.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=names)
    parser.add_argument("--seeds", default="0,1,2", help="with commas between")
    parser.add_argument("--quick", action="store_true", help="a small piece of each stage, for a look that it works")
    parser.add_argument("--out", type=Path, default=Path("experiments"))
    given = parser.parse_args()
    out = (given.out / (f"{given.name}-quick" if given.quick else given.name)).resolve()
    seeds = [0] if given.quick else [int(seed) for seed in given.seeds.split(",")]
    measured = [row for seed in seeds for row in Experiment(given.name, seed, out, quick=given.quick).run()]
    print(table(measured))
    if not given.quick:
        folder = EXAMPLES / given.name
        everything = keep(folder, measured)
        publish(folder / "README.md", "measured", tables(everything, folder / "experiment.toml", table))


if __name__ == "__main__":
    main()
