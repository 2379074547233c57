"""A separate process that runs `one_agent` of a test class and ends while attached.

FAULT prevents the delivery of its spans; ``os._exit`` ends the process at once instead.

Run it as ``python -m lightning_conformance.plugins.ending FILE CLASS FAULT URL``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_conformance.plugins.harmless import broken_delivery
from lightning_conformance.plugins.program import run
from lightning_spans import Attempt, attach, use_attempt

_broken = ExitStack()  # lasts as long as the process


def main(file: str, name: str, fault: str, url: str) -> None:
    """Run the program, and print its output."""
    logging.basicConfig()
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite: Any = getattr(module, name)()
    ends_at_once = fault == "os._exit"
    endpoint, _ = (None, None) if ends_at_once else _broken.enter_context(broken_delivery(fault))
    attach(suite.framework, store="own.db")
    with use_attempt(Attempt("r", "a", endpoint=endpoint, key="k")):
        sys.stdout.write(f"{run(suite.program('one_agent'), url)!r}\n")
    if ends_at_once:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
