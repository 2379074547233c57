"""Run the parts of CI two at a time, report the seconds of each, and run a failed test once more, alone, at the end.

A part that fails does not stop the others. A test that fails in its part and passes alone is printed as FLAKY and does
not fail the run: mend it first thing next time.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

NOX = Path(sys.executable).with_name("nox")
AT_ONCE = 2
ENVIRONMENT = os.environ | {
    "NOX_SCRIPT_MODE": "none",  # otherwise two at once create noxfile.py's own environment in the same folder
    "DRAWS": "fixed",  # Hypothesis: a change must not wait for an unlucky draw in another's test
}

# Longest first, so that the two rows end at about the same time. Each name is a nox session with its arguments.
PARTS = {
    "training": ["training"],
    "tests": ["tests"],
    "verl": ["verl"],
    "together": ["together"],
    "interop": ["interop"],
    "matrix": ["matrix(openai-latest)"],  # the newest of the others that agree are in `together`
    "oldest": [],  # see `expand`
    "chaos": ["chaos", "--", "--kills", "50", "--pauses", "4", "--pause-s", "3"],
    "ray": ["ray"],
    "wheels": ["wheels", "--", "--only", "build"],
    "clients": ["clients"],
    "trackers": ["trackers"],
    "bench": ["bench", "--", "--quick"],
    "deploy": ["deploy"],
    "types": ["types"],
    "docs": ["docs"],
    "lint": ["lint"],
}
FIRST = ("openai", "langchain", "openai-agents", "autogen", "crewai")  # whose oldest versions are in `matrix`
BY_NAME = {"oldest"}  # what runs only where it is named, as in a job of the workflow: it takes 15 minutes
PYTEST = {
    "tests",
    "training",
    "verl",
    "together",
    "interop",
    "matrix",
    "oldest",
    "ray",
    "clients",
    "trackers",
}  # whose tests can run again
PROCESSES = {"chaos", "bench", "deploy"}  # programs that start others, without pytest: they run again as a whole
# Of what a session chooses by itself, `tests`, `training` and `verl` forget the choice where arguments are passed.
AGAIN = ["--last-failed", "--last-failed-no-failures", "none", "-n", "0", "-m", "not full"]


@dataclass
class Part:
    """One nox session of a run of CI."""

    name: str
    arguments: list[str]
    cache: Path
    seconds: float = 0.0
    status: int | None = None
    flaky: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but 0."""
        return self.status != 0

    def failed_tests(self) -> list[str]:
        """Return the tests that pytest noted as failed, over all of the part's environments."""
        return [test for file in self.cache.rglob("lastfailed") for test in json.loads(file.read_text())]


def expand(names: list[str], folder: Path) -> list[Part]:
    """Return the parts named; of `matrix`, `oldest` and `clients` each environment is one."""
    parts = []
    first = [f"matrix({plugin}-oldest)" for plugin in FIRST]
    for name in names:
        sessions = [PARTS[name]]
        if name == "matrix":
            sessions += [[session] for session in first]
        if name == "oldest":
            oldest = [session for session in list_sessions() if session.endswith("-oldest)")]
            sessions = [[session] for session in oldest if session not in first]
        if name == "clients":
            sessions = [[session] for session in list_sessions() if session.startswith("clients(")]
        parts += [Part(name, arguments, folder / arguments[0]) for arguments in sessions]
    return parts


def list_sessions() -> list[str]:
    """Return the names of the sessions with several environments, each environment by itself."""
    command = [NOX, "--list", "--json", "--session", "matrix", "clients"]  # without names nox lists its defaults only
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return [session["session"] for session in json.loads(done.stdout)]


RUNNING: set[subprocess.Popen[bytes]] = set()


def run_nox(part: Part, *arguments: str, output: Path) -> int:
    """Run a part's session into a file, in a process group of its own, and return its exit status."""
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} -o cache_dir={part.cache}"
    environment = ENVIRONMENT | {"PYTEST_ADDOPTS": options}
    command = [NOX, "--no-error-on-missing-interpreters", *arguments]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        RUNNING.add(process)
        status = process.wait()
        RUNNING.discard(process)
    return status


def work(waiting: queue.SimpleQueue[Part], printing: threading.Lock) -> None:
    """Run parts until none is left, and print each one's output when it has ended."""
    while True:
        try:
            part = waiting.get_nowait()
        except queue.Empty:
            return
        output = part.cache.with_suffix(".out")
        began = time.monotonic()
        part.status = run_nox(part, "-s", *part.arguments, output=output)
        part.seconds = time.monotonic() - began
        with printing:
            show(f"{part.arguments[0]}: {'FAILED' if part.failed else 'passed'} after {part.seconds:.0f} s", output)


def show(title: str, output: Path) -> None:
    """Print a title and a file."""
    print(f"\n===== {title}", flush=True)
    with output.open("rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.flush()


def run_again(part: Part) -> None:
    """Run a part's failed tests, or a part of processes as a whole, once more, alone; what passes now is flaky."""
    failed = part.failed_tests() if part.name in PYTEST else [part.name]
    if part.name not in PYTEST | PROCESSES or not failed:
        return
    output = part.cache.with_suffix(".again")
    arguments = part.arguments if part.name in PROCESSES else [part.arguments[0], "--", *AGAIN]
    status = run_nox(part, "-R", "-s", *arguments, output=output)
    show(f"{part.arguments[0]}: {len(failed)} failed, once more, alone", output)
    if status == 0:
        part.status, part.flaky = 0, failed


def stop(*_: object) -> None:
    """End what runs, and this program."""
    for process in list(RUNNING):
        os.killpg(process.pid, signal.SIGTERM)
    raise SystemExit(130)


def main() -> int:
    """Run the parts named on the command line, or all, and return 1 if one failed twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help=f"any of {', '.join(PARTS)}; default: all but oldest")
    parser.add_argument("--list", action="store_true", help="print the parts' names and end")
    options = parser.parse_args()
    if unknown := [name for name in options.part if name not in PARTS]:
        parser.error(f"'{unknown[0]}' is not a part. The parts are {', '.join(PARTS)}.")
    if options.list:
        print("\n".join(PARTS))
        return 0
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with tempfile.TemporaryDirectory(prefix="ci-") as folder:
        parts = expand(options.part or [name for name in PARTS if name not in BY_NAME], Path(folder))
        waiting: queue.SimpleQueue[Part] = queue.SimpleQueue()
        for part in parts:
            waiting.put(part)
        printing = threading.Lock()
        workers = [threading.Thread(target=work, args=(waiting, printing)) for _ in range(AT_ONCE)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for part in parts:
            if part.failed:
                run_again(part)
        print("\n===== seconds of each part")
        for part in parts:
            print(f"{part.seconds:6.0f} s: {part.arguments[0]}{' FAILED' if part.failed else ''}")
        for test in (test for part in parts for test in part.flaky):
            print(f"FLAKY: {test}")
        return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main())
