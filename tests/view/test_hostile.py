"""A real browser opens every page of a run whose every field holds scripts, and counts the scripts that run: none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.looking import Looking, looking
from support.training.hostile_runs import make_hostile_run, script

MOST = 120  # pages
LINKS = "all => [...new Set(all.map(each => each.getAttribute('href')))]"
MARKUP = "main script, main img, main iframe, main svg[onload], main a[href^='javascript']"
SETTINGS = {"step": ["view=table"], "call": ["view=messages", "view=request"]}  # that show more of the same page
SCREENS = {
    "step", "group", "rollout", "call", "tries", "account", "credit", "rewards", "tools", "fleet", "deployments",
    "search", "marks",
}  # fmt: skip
MOVE = """hash => new Promise(done => {
    addEventListener("hashchange", () => requestAnimationFrame(() => requestAnimationFrame(done)), { once: true });
    location.hash = hash;
})"""


def screen_of(address: str) -> str:
    return address.partition("?")[0].split("/")[3] if address.count("/") > 2 else ""


def crawl(look: Looking, first: str) -> tuple[set[str], str]:
    """Open a page and what it leads to, page by page; return their addresses and all that they show."""
    waiting, opened, shown = [first], set[str](), ""
    while waiting and len(opened) < MOST:
        address = waiting.pop(0)
        opened.add(address)
        if look.page.evaluate("location.hash") != address:
            look.page.evaluate(MOVE, address)
        look.until("!document.querySelector('[aria-busy]') && document.querySelector('main h1, main .note')")
        shown += look.page.inner_text("main")
        assert look.page.locator(MARKUP).count() == 0, address
        more = [] if "?" in address else [f"{address}?{setting}" for setting in SETTINGS.get(screen_of(address), ())]
        found = [*more, *look.page.eval_on_selector_all("a[href^='#/']", LINKS)]
        waiting += [each for each in found if each not in opened and each not in waiting]
    return opened, shown


def test_no_script_in_any_field_runs_on_any_page(browser: Any, tmp_path: Path) -> None:
    run = make_hostile_run(tmp_path)
    ran: list[str] = []
    # Without the policy that forbids foreign scripts: what is inserted as markup would run.
    with looking(browser, run, bypass_csp=True) as look:
        look.page.expose_function("ran", lambda field: ran.append(field))  # noqa: PLW0108 - it looks into the function
        look.open("run", run.name)
        opened, shown = crawl(look, look.page.evaluate("location.hash"))
        assert {screen_of(address) for address in opened} >= SCREENS
        look.open("run", run.name, "search", "onerror")
        look.page.wait_for_selector("mark")
        look.open("compare", f"{run.name}|{run.name}")
        look.page.wait_for_selector("table")
        assert ran == []
        assert {field for field in FIELDS if f"ran('{field}" in shown} == FIELDS
        look.page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", script("control"))
        while "control" not in ran:  # the counter counts
            look.page.wait_for_timeout(20)


FIELDS = {
    *("alarm text", "frequent agent", "frequent answer", "metric reward", "option model", "option algorithm"),
    *(f"{table} {column}" for table, column in (
        ("spans", "name"), ("spans", "agent"), ("spans", "status_message"), ("spans", "attributes"),
        ("choices", "message"), ("rewards", "agent"), ("rewards", "source"),
        ("rollouts", "task"), ("attempts", "worker"), ("attempts", "error"), ("viewer_marks", "author"),
        *(("deployments", column) for column in ("agent", "stable", "candidate", "reason", "actor")),
    )),
}  # fmt: skip
"""Fields that the pages show as text; all others are hostile, also where it is only in a title or an address."""
