"""Train the calculator's agents on this machine, see them get better, and ask the tuned model.

`python demo.py` trains both agents; `--agents caller` trains one and leaves the other at its own endpoint. With
`--engine vllm` each agent has a LoRA adapter of its own, and vLLM samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from problems import problems, write
from rich.console import Console
from rich.table import Table

from lightning_trainer import Result, TrainConfig, models, train
from lightning_trainer.report.progress import ProgressDisplay
from lightning_trainer.run.train import describe

HERE = Path(__file__).parent
console = Console()


@contextmanager
def serve_model(model: Path, folder: Path) -> Iterator[None]:
    """Serve a model with `lightning-rl serve`, and point OpenAI programs of this process and its children at it."""
    command = [sys.executable, "-m", "lightning_trainer.cli", "serve", str(model)]
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            os.environ["OPENAI_BASE_URL"] = f"{ready['url']}/v1"
            os.environ["OPENAI_API_KEY"] = Path(ready["key_file"]).read_text().strip()
            yield
        finally:
            process.terminate()
            process.wait(30)


def config_of(model: Path, agents: tuple[str, ...], folder: Path, args: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
        target="agent:run",
        data=write(folder / "train.jsonl", problems(seed=args.seed + 1, count=args.steps * args.batch_size)),
        val=write(folder / "val.jsonl", problems(seed=12345, count=32)),
        val_samples=2,
        agents=agents,
        model=str(model),
        out=folder / "run",
        learning_rate=args.learning_rate or (6e-5 if args.engine is None else 5e-4),
        policies={} if args.engine is None else dict.fromkeys(agents, "lora"),
        engine=args.engine,
        batch_size=args.batch_size,
        group_size=8,
        steps=args.steps,
        until=0.92 if args.backend == "torch" else None,  # verl's trainer can't be stopped between two steps
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        max_model_len=1024,
        concurrency=32,
        seed=args.seed,
    )


def train_agents(model: Path, agents: tuple[str, ...], folder: Path, args: argparse.Namespace) -> Result:
    config = config_of(model, agents, folder, args)
    with ProgressDisplay(f"{', '.join(agents)} of the calculator on {model.name}") as progress:
        return train(config, progress)


def report(result: Result) -> None:
    table = Table(title="Held-out problems, sampled as in training")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    table.add_row("mean reward", f"{before.reward or 0.0:.2f}", f"{after.reward or 0.0:.2f}")
    for agent in sorted({*before.by_agent, *after.by_agent}):
        table.add_row(
            f"success of {agent}", f"{before.by_agent.get(agent, 0):.2f}", f"{after.by_agent.get(agent, 0):.2f}"
        )
    console.print(table)
    console.print(f"curve: {result.folder / 'curve.png'}")


def ask(checkpoint: Path, folder: Path) -> None:
    """Ask the tuned model a question through the same program, at its own endpoint."""
    with serve_model(checkpoint, folder):
        from agent import GRAPH

        question = "What is 47*12?"
        state = asyncio.run(GRAPH.ainvoke({"question": question}))
        console.print(
            f"[bold]{question}[/] calculator: {state['result'] or '(no call)'}; {state.get('answer', '(none)')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default="caller,answerer", help="agents to train, with commas between")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=14, help="most steps; it stops earlier once it is good")
    parser.add_argument("--batch-size", type=int, default=6, help="problems a step, each with 8 rollouts")
    parser.add_argument("--learning-rate", type=float, help="6e-5 by default; 5e-4 for adapters")
    parser.add_argument("--backend", default="torch", choices=("torch", "verl"))
    parser.add_argument("--engine", help="what samples for an adapter of each agent, such as vllm (torch backend)")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="train nothing; the last line is the forecast as JSON")
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("calculator-%Y%m%d-%H%M%S"))
    args = parser.parse_args()
    began = time.monotonic()
    agents = tuple(name.strip() for name in args.agents.split(","))
    folder = args.out.resolve()
    folder.mkdir(parents=True)
    sys.path.insert(0, str(HERE))
    os.chdir(HERE)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    model = models.resolve(args.model)
    if args.dry_run:
        described = describe(config_of(model, agents, folder, args))
        print(described.text, json.dumps(dict(described.facts)), sep="\n")
        return
    if set(agents) >= {"caller", "answerer"}:
        result = train_agents(model, agents, folder, args)
    else:
        with serve_model(model, folder):  # the other agent's own endpoint: the model as it was
            result = train_agents(model, agents, folder, args)
    report(result)
    assert result.checkpoint is not None
    if args.engine is None:  # the program asks for one model, and several adapters are several
        ask(result.checkpoint, folder)
    print(
        json.dumps(
            {
                "reward_before": result.reward_before,
                "reward_after": result.reward_after,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
