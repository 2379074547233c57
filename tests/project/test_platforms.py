"""docs/reference/platforms.md: nothing of ours fails to import where Linux's own modules are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORTED = """
import importlib, os, pkgutil, signal, sys, tempfile
# What is not ours is there already, as that system's own build of it would be.
import asyncio.subprocess, click, fastapi, httpx, multiprocessing.util, openai, pydantic, rich.console, sqlalchemy
import concurrent.futures.process, http.server, sqlite3, sqlalchemy.dialects.sqlite, uvicorn
import opentelemetry.trace, opentelemetry.sdk.trace, prometheus_client, orjson, aiohttp

platform, missing, taken = sys.argv[1], set(sys.argv[2].split(",")), sys.argv[3].split(",")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in missing:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in taken:
    home = signal if name.startswith("SIG") else os
    if hasattr(home, name):
        delattr(home, name)
sys.platform = platform
if platform == "win32":
    import types
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")

import lightning_spans, lightning_openai
for name in lightning_spans.__all__:
    getattr(lightning_spans, name)
for module in ("record.pipeline", "store.sql.store", "store.http", "record.delivery.outbox", "adapter.trace"):
    importlib.import_module(f"lightning_spans.{module}")
from lightning_trainer.cli import COMMANDS
for name, each in COMMANDS.items():
    importlib.import_module(each.module)
for name in ("gateway.app", "gateway.auth.register", "report.progress", "models", "config.train"):
    importlib.import_module(f"lightning_trainer.{name}")
print("imported")
"""
WINDOWS = (
    "fcntl,resource,pwd,grp,termios,tty,pty,syslog,readline,uvloop",
    "fork,killpg,setsid,getuid,geteuid,getpgid,fchmod,sched_getaffinity,sched_setaffinity,O_CLOEXEC,SIGKILL",
)
MACOS = ("uvloop", "sched_getaffinity,sched_setaffinity,prctl,memfd_create,pidfd_open")


@pytest.mark.parametrize(
    ("platform", "missing", "taken"), [("win32", *WINDOWS), ("darwin", *MACOS)], ids=["Windows", "macOS"]
)
def test_everything_that_is_no_training_imports_on_other_systems(
    platform: str, missing: str, taken: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", IMPORTED, platform, missing, taken]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "imported\n", done.stderr
