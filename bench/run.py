"""Run every benchmark, print one table, write one file.

    python bench/run.py [NAME ...] [--quick] [--json bench.json]

NAME is that of a module without ``bench_``, as in ``python bench/run.py capture``. Each has a `measure()`,
which gives a list of `figures.Figure`, and runs in a process of its own, so that none leaves anything behind for the
next. One that fails is shown with its error and makes the exit status 1; the others go on. `--quick` runs each at a
small size, with a tiny random model and nothing of other projects: it shows that they run, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures import Figure
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def measure_here(name: str, out: Path) -> None:
    """The child's part: measure, and write what was found."""
    found: list[Figure] = importlib.import_module(f"bench_{name}").measure()
    out.write_text(json.dumps([asdict(figure) for figure in found]))


def measure(name: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        begin = time.monotonic()
        command = [sys.executable, str(FOLDER / "run.py"), name, "--child", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        figures = [Figure(**data) for data in json.loads(out.read_text())] if out.exists() else []
    error = "" if done.returncode == 0 and figures else (done.stderr or done.stdout or "no figures").strip()
    return {"name": name, "figures": figures, "error": error, "seconds": time.monotonic() - begin}


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def table(results: list[dict[str, Any]]) -> Table:
    load, cores = (
        os.getloadavg()[0],
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )
    busy = (
        f"The machine is busy (load {load:.0f} on {cores} cores): times, CPU times too, are longer than they need be."
    )
    caption = busy if load > 1.5 * cores else None
    shown = Table(title="Ours, beside what others were measured to do", caption=caption)
    for column in ("benchmark", "what", "ours", "goal", "", "others", "how"):
        shown.add_column(column, justify="right" if column in {"ours", "goal"} else "left", overflow="fold")
    for result in results:
        for figure in result["figures"]:
            shown.add_row(
                result["name"],
                figure.what,
                f"{_short(figure.value)} {figure.unit}",
                "" if figure.goal is None else f"{'≥' if figure.more_is_better else '≤'} {_short(figure.goal)}",
                {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.met],
                figure.others,
                figure.note,
            )
        if result["error"]:
            shown.add_row(result["name"], "[red]failed[/]", "", "", "", "", result["error"].splitlines()[-1])
        shown.add_section()
    return shown


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"any of: {', '.join(names())}; all by default")
    parser.add_argument("--json", default="bench.json", help="file to write; bench.json by default")
    parser.add_argument("--quick", action="store_true", help="only see that each runs; its figures say nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.names) - set(names())
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}. There are: {', '.join(names())}")
    if given.child:
        measure_here(given.names[0], Path(given.child))
        return 0
    if given.quick:
        os.environ["BENCH_QUICK"] = "1"
        for name in [name for name in os.environ if name.startswith("BENCH_") and name.endswith("_PYTHON")]:
            del os.environ[name]
    console = Console(width=None if sys.stdout.isatty() else 180)
    results = []
    for name in given.names or names():
        console.print(f"$ python bench/run.py {name}")
        results.append(measure(name))
        if results[-1]["error"]:
            console.print(results[-1]["error"], style="red", markup=False, highlight=False)
    console.print(table(results))
    written = {
        "machine": machine(),
        "benchmarks": [
            {
                **result,
                "command": f"python bench/run.py {result['name']}",
                "figures": [{**asdict(figure), "met": figure.met} for figure in result["figures"]],
            }
            for result in results
        ],
    }
    Path(given.json).write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    console.print(f"written: {given.json}")
    return 1 if any(result["error"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
