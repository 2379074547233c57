"""Runs to look at, and a browser to look with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.training.example_runs import attacks, make_run
from support.view import Asked


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three agents that learn."""
    return make_run(tmp_path_factory.mktemp("runs") / "calculator", steps=2, groups=2, size=4)


@pytest.fixture(scope="session")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose every text is hostile."""
    return make_run(tmp_path_factory.mktemp("runs") / "nasty", steps=1, groups=2, size=8, play=attacks)


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


PICTURES = Path(__file__).parents[2] / "docs" / "img" / "view"


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Any:
    """Writes a picture of a page into the docs, where that is asked for."""

    def take(look: Any, name: str) -> None:
        if request.config.getoption("--pictures"):
            from PIL import Image

            PICTURES.mkdir(parents=True, exist_ok=True)
            look.page.wait_for_load_state("load")
            look.page.screenshot(path=str(PICTURES / f"{name}.png"))
            Image.open(PICTURES / f"{name}.png").quantize(256, Image.Quantize.MAXCOVERAGE).save(
                PICTURES / f"{name}.png", optimize=True
            )

    return take


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="Write the docs' pictures of the viewer anew.")
