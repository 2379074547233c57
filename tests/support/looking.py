"""The viewer in a real browser: a page, what it requested, and what it complained of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.kits.view.pages import create_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs

AXE = Path(__file__).parents[2] / "trainer/viewer/node_modules/axe-core/axe.min.js"


class Looking:
    """A page, what it asked for, and what it complained of."""

    def __init__(self, page: Any, url: str, key: str) -> None:
        self.page, self.url, self._key = page, url, key
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))

    def open(self, *where: object) -> None:
        """Go to a screen with the key in the address, as `lightning-rl view` prints it, and wait until it is there."""
        if "/view/" not in self.page.url:
            self.page.goto(f"{self.url}/view/#key={self._key}")
            self.page.wait_for_selector("h1")
        address = "/".join(quote(str(part), safe="?=") for part in where)
        self.page.evaluate("hash => { location.hash = hash }", f"/{address}")
        self.page.wait_for_selector("h1")

    def until(self, condition: str) -> None:
        """Wait until something is true in the page. Playwright's own way needs `eval`, which the page forbids."""
        for _ in range(400):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {condition}")

    def text(self, selector: str) -> str:
        return " ".join(self.page.locator(selector).first.inner_text().split())

    def number(self, name: str) -> int:
        self.until(f"/[0-9]/.test(document.querySelector('[data-testid={name}]')?.textContent ?? '')")
        found = re.search(r"[\d,]+", self.text(f"[data-testid='{name}']"))
        assert found is not None
        return int(found[0].replace(",", ""))

    def broken_rules(self) -> list[Any]:
        """Return the rules of accessibility that the page breaks, each with the first place."""
        if not AXE.is_file():
            pytest.skip("axe-core is not there: nox -s view gets it")
        asked = self.page.context.new_cdp_session(self.page)  # from outside: the page lets no script in
        code = f"{AXE.read_text()};axe.run().then(all => all.violations.map(one => [one.id, one.nodes[0].html]))"
        told = asked.send("Runtime.evaluate", {"expression": code, "awaitPromise": True, "returnByValue": True})
        return list(told["result"]["value"])

    def well(self) -> None:
        """Nobody else was asked, and nothing was complained of."""
        assert {url.split("/", 3)[2] for url in self.asked if not url.startswith(("data:", "blob:"))} == {
            self.url.split("/", 3)[2]
        }
        assert self.complaints == []


@contextmanager
def looking(browser: Any, path: Path, **more: Any) -> Iterator[Looking]:
    keys = Keys.fresh()
    views = more.pop("views", None) or Views(Runs(path))
    with ServerThread(create_view(views, keys)) as server:
        try:
            with looking_at(browser, server.url, keys.issue("viewer"), **more) as look:
                yield look
        finally:
            views.stopping.set()


@contextmanager
def looking_at(browser: Any, url: str, key: str, **more: Any) -> Iterator[Looking]:
    context = browser.new_context(
        viewport=more.pop("viewport", {"width": 1280, "height": 800}), reduced_motion="reduce", locale="en-GB",
        timezone_id="UTC", **more,
    )  # fmt: skip
    context.set_default_timeout(20_000)
    page = context.new_page()
    try:
        yield Looking(page, url, key)
    finally:
        context.close()
