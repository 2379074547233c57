"""Runs to look at, and a browser to look with."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parent))

from made import attacks, make_run

from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.kits.view.pages import create_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three agents that learn."""
    return make_run(tmp_path_factory.mktemp("runs") / "calculator", steps=2, groups=2, size=4)


@pytest.fixture(scope="session")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose every text is hostile."""
    return make_run(tmp_path_factory.mktemp("runs") / "nasty", steps=1, groups=2, size=8, play=attacks)


class Asked:
    """The viewer's interface, asked with a key."""

    def __init__(self, path: Path) -> None:
        self.keys = Keys.fresh()
        self.app = create_view(Views(Runs(path, trusted=True)), self.keys)
        self.client = TestClient(self.app)
        self.name = path.name

    def __call__(self, what: str, status: int = 200, *, scope: Any = "viewer", **params: Any) -> Any:
        key = self.keys.issue(scope)
        answer = self.client.get(
            f"/api/view/{what}", params={"run": self.name, **params}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def ask(run: Path) -> Asked:
    return Asked(run)


@pytest.fixture
def ask_nasty(nasty: Path) -> Asked:
    return Asked(nasty)


CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: nox -s view needs one")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="Write the docs' pictures of the viewer anew.")
