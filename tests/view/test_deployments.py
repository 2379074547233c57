"""The page of deployments: which policy answers each agent, what its candidate's evidence is, where the loop is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.store import open_store
from lightning_trainer.kits.deploy.table import keep, read_histories
from lightning_trainer.kits.deploy.transitions import Policy, begin_canary, name_candidate, promote, roll_back
from lightning_trainer.kits.loop.record import StageResult, rounds_in, write_status
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs
from support.deployments import make_deployments, make_loop, make_many, newest, note
from support.gateway.deploy_site import open_site
from support.looking import Looking, looking, looking_at
from support.view import Asked

LIST = "[aria-label=deployments] tbody tr"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_deployments(tmp_path / "lightning.db")


@pytest.fixture
def views(path: Path, monkeypatch: pytest.MonkeyPatch) -> Views:
    monkeypatch.chdir(path.parent)
    return Views(Runs(store=path.name), loops=make_loop(Path("loops") / "writer").parent)


@pytest.fixture
def look(browser: Any, path: Path, views: Views) -> Iterator[Looking]:
    with looking(browser, path, views=views) as found:
        yield found
        found.well()


def test_the_pages_say_what_status_says(path: Path) -> None:
    ask = Asked(path, Views(Runs(store=str(path))))
    said = newest(path, "writer")
    found = ask("findings", agent="writer")
    assert {name: found["gate"][name] for name in said["gate"]} == said["gate"]
    assert {guard.pop("name"): guard for guard in found["guardrails"]} == said["guardrails"]
    assert (found["shadow"]["copies"], found["shadow"]["agreement"][0]["mean"]) == (100, 0.9)
    assert (found["approval"]["actor"], found["verified"]) == ("grace", False)
    rows = ask("deployments")["agents"]
    assert [(row["agent"], row["newest"]["stage"], row["tried"]) for row in rows] == [
        ("planner", "stable", False), ("reader", "shadow", True), ("router", "rolled_back", False),
        ("writer", "canary", True),
    ]  # fmt: skip
    ask("deployment", 400, agent="nobody")


def test_a_page_says_what_a_promotion_still_needs(path: Path) -> None:
    ask = Asked(path, Views(Runs(store=str(path))))
    gate, *others = ask("findings", agent="writer")["missing"]
    assert gate.startswith("240 outcomes of writer@3f2a91c0 and 720 of gpt. About ")
    assert others == []
    (stage,) = ask("findings", agent="reader")["missing"]
    assert "in the stage shadow" in stage
    assert ask("findings", agent="planner")["missing"] == []


def test_the_list_leads_to_an_agent_with_its_evidence(look: Looking, picture: Any) -> None:
    look.open("run", "store")
    look.page.click("nav >> text=Deployments")
    look.page.wait_for_selector(f"{LIST} >> text=of about")
    assert look.page.locator(LIST).count() == 4
    row = look.text(f"{LIST}:has-text('writer')")
    assert "canary gpt writer@3f2a91c0 25 % 960 of about" in row
    assert "+0.121" in row
    assert "canary waits for the decision of the gate: 960 of about 4200 outcomes" in look.text(".loop summary")
    picture(look, "deployments")
    look.page.click(f"{LIST} a:has-text('writer')")
    look.page.wait_for_selector("[aria-label=gate] svg")
    assert "writer@3f2a91c0 answers 25 % of the conversations, and gpt the others." in look.text(".lead")
    assert "A promotion still needs" in look.page.inner_text("main")
    assert "by grace" in look.text("[aria-label=checks]")
    assert look.page.locator("section[aria-label=guardrails] tbody tr").count() == 2
    assert look.page.locator("[aria-label=history] tbody tr").count() == 5
    assert "lightning-rl deploy promote --agent writer --store " in look.text(".commands")
    picture(look, "deployment")
    look.page.keyboard.press("u")
    look.page.wait_for_selector(LIST)


def test_a_transition_and_a_stage_of_a_loop_wake_the_page(look: Looking, path: Path) -> None:
    look.open("run", "store", "deployments")
    look.page.wait_for_selector(f"{LIST} >> text=25 %")
    with closing(open_store(str(path))) as store:
        history = read_histories(store)["writer"]
        keep(store, begin_canary(history[-1], "writer", 0.4, note(9)))
    look.page.wait_for_selector(f"{LIST} >> text=40 %")
    current = rounds_in(path.parent / "loops" / "writer")[-1]
    current.write("canary", StageResult({"policy": "writer@3f2a91c0"}, "rolled back", "complaints"))
    write_status(path.parent / "loops" / "writer")
    look.page.wait_for_selector(".loop summary >> text=rolled back. complaints")
    look.open("run", "store", "deployments", "writer")
    look.page.wait_for_selector("text=answers 40 % of the conversations")
    with closing(open_store(str(path))) as store:
        keep(store, roll_back(read_histories(store)["writer"], "writer", note(10, "complaints")))
    look.page.wait_for_selector("text=writer@3f2a91c0 was rolled back")
    assert "complaints" in look.text("[aria-label=history] tbody tr")


def test_a_person_acts_on_the_page_and_the_server_decides(browser: Any, tmp_path: Path, picture: Any) -> None:
    with (
        open_site(tmp_path) as site,
        looking_at(browser, site.url, site.keys.issue("viewer")) as look,
    ):
        key = site.key("deployer").read_text()
        look.open("run", "store", "deployments", "writer")
        look.page.click("[aria-label=actions] >> text=Canary")
        look.page.fill("input[name=share]", "30")
        look.page.fill("input[name=reason]", "no alarm for a day")
        look.page.fill("input[name=key]", key)
        look.page.evaluate("scrollTo(0, document.querySelector('.act').offsetTop - 80)")
        picture(look, "acting")
        look.page.fill("input[name=key]", site.keys.issue("viewer"))
        look.page.click(".act button[type=submit]")
        look.page.wait_for_selector(".act .note.bad >> text=deployer")
        look.page.fill("input[name=key]", key)
        look.page.click(".act button[type=submit]")
        look.page.wait_for_selector("text=answers 30 % of the conversations")
        assert [(row.share, row.actor, row.reason) for row in site.history()[2:]] == [
            (0.3, "ada", "no alarm for a day")
        ]
        look.page.wait_for_selector("[aria-label=history] >> text=in the viewer")
        look.page.click("[aria-label=actions] >> text=Promote")
        look.page.route("**/api/deployments/act", lambda route: route.abort())
        look.page.click(".act button[type=submit]")
        look.page.wait_for_selector(".act .note.bad >> text=The server did not answer")
        look.page.unroute("**/api/deployments/act")
        look.page.click(".act button[type=submit]")
        look.page.wait_for_selector(".act >> text=not promoted: 0 outcomes of new")
        look.page.click("[aria-label=actions] >> text=Promote")
        assert site.deploy("rollback").exit_code == 0
        look.page.wait_for_selector("text=has changed this deployment since you chose")
        assert look.page.locator(".act button[type=submit]").count() == 0
        kept = look.page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
        assert key not in kept
        assert all(any(said in one for said in ("403", "400", "ERR_FAILED")) for one in look.complaints)


def test_a_page_without_a_server_names_the_commands(look: Looking) -> None:
    look.open("run", "store", "deployments", "writer")
    look.page.wait_for_selector(".commands")
    assert look.page.locator(".act").count() == 0
    commands = look.page.inner_text(".commands").splitlines()
    assert [line.split()[2] for line in commands] == ["canary", "promote", "rollback"]  # it has an approval
    assert all("--agent writer --store " in line for line in commands)


def test_after_a_dropped_candidate_the_page_offers_no_rollback_that_is_refused(browser: Any, tmp_path: Path) -> None:
    with (
        open_site(tmp_path) as site,
        looking_at(browser, site.url, site.keys.issue("viewer")) as look,
    ):
        site.write(promote(site.history()[-1], "writer", note(9)))
        look.open("run", "store", "deployments", "writer")
        look.page.wait_for_selector("[aria-label=actions] >> text=Roll back")
        site.write(name_candidate(site.history()[-1], "writer", Policy("newer"), note(10)))
        site.write(roll_back(site.history(), "writer", note(11)))
        look.page.wait_for_selector("text=newer was rolled back")
        assert look.page.locator("[aria-label=actions]").count() == 0
        (command,) = look.page.inner_text(".commands").splitlines()
        assert command.startswith("lightning-rl deploy rollback --last-promotion --reason TEXT --agent writer --store ")
        look.well()


def test_fifty_agents_with_two_thousand_transitions_are_paged(browser: Any, tmp_path: Path) -> None:
    path = make_many(tmp_path / "lightning.db", agents=50, transitions=2000)
    with looking(browser, path, views=Views(Runs(store=str(path)))) as look:
        look.open("run", "store", "deployments")
        look.page.wait_for_selector(LIST)
        assert look.page.locator(LIST).count() == 50
        look.page.wait_for_selector(f"{LIST}:last-child >> text=wait")
        look.page.click(f"{LIST}:last-child a")
        rows = "[aria-label=history] tbody tr"
        look.page.wait_for_selector(rows)
        assert look.page.locator(rows).count() == 40
        look.well()
    one = make_many(tmp_path / "one.db", agents=1, transitions=120)
    with looking(browser, one, views=Views(Runs(store=str(one)))) as look:
        look.open("run", "store", "deployments", "agent 00")
        look.page.click("text=Show 70 more of 120")
        look.until(f"document.querySelectorAll('{rows}').length === 120")
        assert look.text(f"{rows}:last-child td") == "1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_deployments_are_read_on_a_phone_and_break_no_rule_of_accessibility(
    browser: Any, path: Path, views: Views, scheme: str
) -> None:
    size = {"light": 1280, "dark": 390}[scheme]
    with looking(browser, path, views=views, viewport={"width": size, "height": 800}, color_scheme=scheme) as look:
        for screen in ("deployments", "deployments/writer", "deployments/reader", "deployments/planner"):
            look.open("run", "store", *screen.split("/"))
            look.until("!document.querySelector('[aria-busy]')")
            assert look.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), screen
            assert look.broken_rules() == [], screen
        look.well()


def test_a_store_without_deployments_says_how_to_begin(browser: Any, run: Path, tmp_path: Path) -> None:
    open_store(str(tmp_path / "empty.db")).close()
    with looking(browser, tmp_path, views=Views(Runs(store=str(tmp_path / "empty.db")))) as look:
        look.open("run", "store", "deployments")
        look.page.wait_for_selector("text=lightning-rl deploy candidate")
    with looking(browser, run) as look:
        look.open("run", run.name)
        look.page.wait_for_selector("nav >> text=Fleet")
        assert look.page.locator("nav >> text=Deployments").count() == 0, "a training run has none"
