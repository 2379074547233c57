"""The pages in a real browser: each screen opens, says what the store says, asks nobody else, and complains of nothing.

`nox -s view` runs it, and with `-- --pictures` writes docs/img/view anew.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from lightning_spans.schema.attempts import End, Rollout
from lightning_spans.store import open_store
from support.looking import Looking, looking
from support.training.example_runs import Scene, Words, assistant, make_run, user
from support.training.printed import printed
from support.view import Asked

pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of agents that learn."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "other", steps=2, groups=2, size=4, seed=2)
    make_run(folder / "calculator", steps=4, groups=4, size=6)
    return folder


@pytest.fixture
def look(browser: Any, runs: Path) -> Iterator[Looking]:
    with looking(browser, runs) as found:
        yield found
        found.well()


def test_a_run_is_opened_from_the_list_and_its_steps_from_the_chart(look: Looking, picture: Any) -> None:
    look.open()
    look.page.click("text=calculator")
    look.page.wait_for_selector(".chart canvas")
    assert look.page.locator(".chart").count() >= 8
    assert look.page.locator("tr.train").count() == 4
    figures = look.page.locator(".figure").all()
    assert [look.page.locator(".figure dt").nth(at).inner_text() for at in range(4)] == [
        "Held-out reward, trained agents", "Best checkpoint", "Alarms", "Cost",
    ]  # fmt: skip
    assert "held-out reward" in look.text(".lead")
    charts = look.page.locator(".chart").first.bounding_box()
    assert all(figure.bounding_box()["y"] < charts["y"] for figure in figures)
    assert look.page.locator(".by-agent tbody tr").count() == 3
    picture(look, "run")
    look.page.keyboard.press("t")
    look.until("document.documentElement.dataset.theme === 'dark'")
    picture(look, "dark")
    look.page.keyboard.press("t")
    look.page.click("tr.train >> text=step 3")
    look.page.wait_for_selector(".cell")
    assert look.text("h1") == "Step 3"
    assert look.page.evaluate("location.hash").endswith("/step/train/3")
    look.page.go_back()
    look.page.click(".figure >> text=step 3")
    look.page.wait_for_selector(".cell")
    assert look.text("h1") == "Held out after step 3"


def test_a_policy_that_fell_is_seen_on_the_page_of_its_run(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "fell", steps=4, groups=1, size=2)
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(options | {"policies": {"planner": "lora", "solver": "lora"}}))
    (run / "best" / "planner").mkdir(parents=True)
    fell = {"kind": "rollback", "step": 3, "policy": "planner", "to_step": 0, "best": 0.9, "reward": 0.2}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (fell, {**fell, "to_step": "many"}))
    with looking(browser, run) as look:
        look.open("run", "fell")
        table = look.page.locator("[aria-label='best weights by policy'] tbody tr").all_inner_texts()
        assert [row.split("\t")[-2:] for row in table] == [["after step 3", "best/planner"], ["never", "\N{EN DASH}"]]
        assert "planner returned to its first weights" in look.text(".chart")
        assert look.page.locator("figcaption:has-text('Share of the gradient by agent')").count() == 1
        look.well()


def test_latency_and_tokens_sort_by_every_percentile(look: Looking) -> None:
    look.open("run", "calculator", "tools", "train", 2)
    rows = "[aria-label='latency and tokens of model calls'] tbody tr"
    look.page.wait_for_selector(rows)
    assert "whole rollouts" in look.text(f"{rows}:first-child")
    for column in (4, 6, 8, 11):
        look.page.click(
            f"[aria-label='latency and tokens of model calls'] thead tr:last-child th:nth-child({column}) button"
        )
        look.until("location.hash.includes('calls=-')")
        cells = [
            text.replace(",", "").split()
            for text in look.page.locator(f"{rows} td:nth-child({column})").all_inner_texts()
        ]
        values = [
            float(number) * {"s": 1000, "min": 60_000}.get(unit, 1)
            for number, unit in (cell if len(cell) == 2 else (cell[0], "") for cell in cells)
        ]
        assert values == sorted(values, reverse=True)


def test_a_step_says_what_the_store_says_and_filters_by_a_click(look: Looking, runs: Path, picture: Any) -> None:
    look.open("run", "calculator", "step", "train", 2)
    look.page.wait_for_selector(".cell")
    store = open_store(str(runs / "calculator" / "lightning.db"))
    ids = [r.rollout_id for r in store.rollouts() if ":t1-" in r.rollout_id]
    store.close()
    lines = [line for rollout in ids for line in printed(runs / "calculator", "--rollout", rollout)]
    assert look.number("rollouts") == len(ids) == 24
    assert look.number("calls") == sum(line["operation"] == "chat" for line in lines)
    picture(look, "step")
    first = look.page.locator(".histogram button").first
    inside = int(first.locator("b").inner_text())
    first.click()
    assert look.page.locator(".cell:not(.faded)").count() == inside
    first.click()
    look.page.fill("input[type=search]", "invalid syntax")
    failed = {line["rollout_id"] for line in lines if line["operation"] == "execute_tool" and line["status"] == "error"}
    look.until(f"document.querySelectorAll('.cell:not(.faded)').length === {len(failed)}")


def test_a_screen_is_shown_to_others_as_it_is_set(look: Looking) -> None:
    look.open("run", "calculator", "step", "train", 2)
    look.page.wait_for_selector(".cell")
    look.number("calls")
    look.page.locator(".histogram button").first.click()
    look.page.select_option("label:has-text('agent') select >> nth=-1", "solver")
    look.page.fill("input[type=search]", "invalid syntax")
    look.until("location.hash.includes('text=')")
    look.page.click("text=table")
    look.page.click("thead >> text=response tokens")
    look.page.wait_for_selector("tbody tr .clip")
    set_to, shown = look.page.evaluate("location.hash"), look.page.locator("tbody tr").all_inner_texts()
    assert shown
    look.open("run", "calculator")
    look.page.wait_for_selector(".figure")
    look.page.evaluate("hash => { location.hash = hash }", set_to)
    look.page.wait_for_selector("tbody tr .clip")
    look.until(f"document.querySelectorAll('tbody tr').length === {len(shown)}")
    assert look.page.locator("tbody tr").all_inner_texts() == shown
    assert look.page.input_value("input[type=search]") == "invalid syntax"
    assert look.page.locator(".histogram button[aria-pressed=true]").count() == 1


def test_the_table_of_rollouts_sorts_by_every_column(look: Looking, picture: Any) -> None:
    look.open("run", "calculator", "step", "train", "2?view=table")
    look.page.wait_for_selector("tbody tr .clip")
    look.number("calls")

    def column(name: str) -> list[float]:
        names = [text.rstrip(" ↓↑") for text in look.page.locator("thead th").all_inner_texts()]
        cells = look.page.locator(f"tbody td:nth-child({names.index(name) + 1})").all_inner_texts()
        return [float(cell.replace(",", "").split()[0]) for cell in cells if cell.strip() != "\N{EN DASH}"]

    assert column("lowest agent") == sorted(column("lowest agent"))
    picture(look, "table")
    for name in ("reward", "solver", "calls", "tools", "errors", "prompt tokens", "response tokens"):
        look.page.click(f"thead button:has-text('{name}')")
        assert column(name) == sorted(column(name), reverse=True), name
        look.page.click(f"thead button:has-text('{name}')")
        assert column(name) == sorted(column(name)), name
    assert "sort=response" in look.page.evaluate("location.hash")


def test_a_reward_and_an_agent_have_one_colour_in_the_whole_run(look: Looking) -> None:
    shades: dict[str, set[str]] = {}
    hues: dict[str, set[str]] = {}
    for where in ("step/train/1", "step/train/4", "group/calculator-0a1b2c3d:t2-0", "credit/2", "rewards/train/3"):
        look.open("run", "calculator", *where.split("/"))
        look.page.reload()
        look.page.wait_for_selector(".cell, .heat td")
        look.until("!document.querySelector('[aria-busy]')")
        for text, name in look.page.eval_on_selector_all(".cell", "all => all.map(e => [e.innerText, e.className])"):
            shades.setdefault(text.strip(" ✕\n"), set()).add(re.findall(r"shade-\w+", name)[0])
        for text, name in look.page.eval_on_selector_all(".agent", "all => all.map(e => [e.innerText, e.className])"):
            hues.setdefault(text, set()).add(re.findall(r"hue-\w+", name)[0])
    assert {"0", "0.5", "1"} <= shades.keys()
    assert all(len(found) == 1 for found in (*shades.values(), *hues.values())), (shades, hues)
    assert len({name for found in hues.values() for name in found}) == len(hues) == 3


def test_a_group_stands_side_by_side(look: Looking, runs: Path, picture: Any) -> None:
    look.open("run", "calculator", "group", "calculator-0a1b2c3d:t1-0")
    look.page.wait_for_selector(".side td .event")
    columns = look.page.locator(".side th").count()
    assert columns + look.page.locator(".twin").count() == 6
    look.page.click("text=fold those")
    assert look.page.locator(".side th").count() == 6
    look.page.click("text=fold those")
    members = Asked(runs / "calculator")("group", group="calculator-0a1b2c3d:t1-0")["members"]
    lowest = {member["row"]["rollout_id"]: member["row"]["lowest"] for member in members}
    shown = look.page.eval_on_selector_all(".side th .cell", "all => all.map(each => each.getAttribute('href'))")
    values = [lowest[unquote(address.rpartition("/")[2])] for address in shown]
    assert values == sorted(values, reverse=True)
    picture(look, "group")


def test_a_rollout_is_walked_by_keys(look: Looking, runs: Path, picture: Any) -> None:
    rollout = "calculator-0a1b2c3d:t1-0-1"
    look.open("run", "calculator", "rollout", rollout)
    look.page.wait_for_selector(".event.chosen")
    lines = printed(runs / "calculator", "--rollout", rollout)
    assert look.number("spans") == len(lines) == look.page.locator(".track .span").count()
    assert look.number("calls") == sum(line["operation"] == "chat" for line in lines)
    assert "planner" in look.text(".event.chosen")
    look.page.keyboard.press("j")
    assert "solver" in look.text(".event.chosen")
    picture(look, "rollout")
    look.page.keyboard.press("Enter")
    look.page.wait_for_selector(".token")
    look.page.keyboard.press("u")
    look.page.wait_for_selector(".event.chosen")
    assert "solver" in look.text(".event.chosen")
    look.page.keyboard.press("n")
    look.until("location.hash.includes('t1-0-2')")


def test_a_mark_is_seen_in_another_browser_and_saved(browser: Any, runs: Path) -> None:
    with looking(browser, runs) as mine, looking(browser, runs) as other:
        other.open("run", "calculator", "marks")
        other.page.wait_for_selector("text=Nothing is marked")
        mine.open("run", "calculator", "marks")
        mine.page.fill("input >> nth=0", "ana")
        mine.open("run", "calculator", "rollout", "calculator-0a1b2c3d:t1-0-1")
        mine.page.wait_for_selector(".event.chosen")
        mine.page.keyboard.press("m")
        mine.page.fill("input[aria-label=comment]", "wrong plan")
        mine.page.keyboard.press("Tab")
        other.page.wait_for_selector("text=by ana")
        other.until("document.querySelector('input[aria-label=comment]').value === 'wrong plan'")
        with other.page.expect_download() as saved:
            other.page.click("text=Save the marks")
        (line,) = Path(saved.value.path()).read_text().splitlines()
        assert json.loads(line)["comment"] == "wrong plan"
        other.page.click("text=remove")
        mine.page.wait_for_selector("text=☆ mark")
        mine.well()
        other.well()


def test_a_call_is_shown_as_the_tokens_that_were_drawn(look: Looking, runs: Path, picture: Any) -> None:
    rollout = "calculator-0a1b2c3d:t1-0-1"
    chats = [line for line in printed(runs / "calculator", "--rollout", rollout) if line["operation"] == "chat"]
    look.open("run", "calculator", "call", rollout, f"{rollout}.1", chats[2]["span_id"])
    look.page.wait_for_selector(".response .token")
    assert look.page.locator(".response .token").count() == len(chats[2]["response_token_ids"])
    assert look.page.locator(".prompt .token").count() == len(chats[2]["prompt_token_ids"])
    picture(look, "call")
    look.page.click("text=mask")
    assert look.page.locator(".response .token.trained").count() == len(chats[2]["response_token_ids"])
    assert look.page.locator(".prompt .token.trained").count() == len(chats[1]["response_token_ids"])
    for overlay in ("entropy", "gap"):
        look.page.click(f"button:text-is('{overlay}')")
        shown = look.page.locator(".response .token:is([class*=lp-], [class*=shade-])").count()
        said = look.page.locator(".note").count()
        assert shown == len(chats[2]["response_token_ids"]) or said == 1
    look.page.click("text=raw request")
    assert "You solve what is planned" in look.text(".raw")


def test_the_account_adds_up_and_leads_to_the_calls(look: Looking, picture: Any) -> None:
    look.open("run", "calculator", "account", 2)
    look.page.wait_for_selector(".funnel")
    texts = look.page.locator(".funnel").first.locator("b").all_inner_texts()
    numbers = [int(text.replace(",", "").replace("\N{MINUS SIGN}", "-")) for text in texts]
    seen, *losses, trained, merged, rows, _ = numbers
    assert seen + sum(losses) == trained == merged + rows
    look.page.click(".funnel summary")
    picture(look, "account")
    look.page.click(".funnel .links a")
    look.page.wait_for_selector(".tokens")


def test_a_task_before_and_after_is_two_clicks_away(look: Looking, picture: Any) -> None:
    look.open("run", "calculator")
    look.page.click("nav >> text=Before/after")
    look.page.click("table.rows a")
    look.page.wait_for_selector("section[aria-label=left] .event")
    look.page.wait_for_selector("section[aria-label=right] .event")
    assert "before training" in look.page.locator("select").first.locator("option:checked").inner_text()
    assert "held out after step 3" in look.page.locator("select").nth(1).locator("option:checked").inner_text()
    assert "lightning-rl eval team:run" in look.text(".commands")
    picture(look, "tries")
    look.page.click("section[aria-label=right] >> text=whole group")
    look.page.wait_for_selector(".side td .event")
    look.page.click("text=before and after")
    look.page.wait_for_selector("section[aria-label=left] .event")


@pytest.mark.parametrize("screen", ["credit", "rewards", "tools"])
def test_the_other_screens_of_a_step_open(look: Looking, picture: Any, screen: str) -> None:
    look.open("run", "calculator", screen, *([] if screen == "credit" else ["train"]), 2)
    look.page.wait_for_selector({"credit": ".heat td b", "rewards": ".scatter circle", "tools": ".meter"}[screen])
    picture(look, screen)
    if screen == "credit":
        look.page.select_option("main label select", "last")
        look.page.wait_for_selector("text=as this method would assign it")


@pytest.mark.parametrize("screen", ["step", "account", "credit", "rewards", "tools"])
def test_an_address_that_names_no_step_shows_the_last(look: Looking, screen: str) -> None:
    look.open("run", "calculator", screen, *([] if screen in ("account", "credit") else ["train"]), "lots")
    look.until("/step [0-9]/i.test(document.querySelector('h1').textContent)")


def test_the_screens_beside_them_open(look: Looking) -> None:
    look.open("run", "calculator", "fleet")
    look.page.wait_for_selector("text=runner/one")
    look.open("run", "calculator", "search", "invalid syntax")
    look.page.wait_for_selector("mark")
    assert "What is" in look.text(".links.wide .task-line")
    assert re.search(r"[0-9]+ identical", look.page.inner_text(".links.wide"))
    look.page.click(".links.wide a")
    look.page.wait_for_selector(".event.chosen")
    look.open("compare", "calculator|other")
    look.page.wait_for_selector("text=What differs")


def test_what_is_written_shows_without_a_reload(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", steps=1, groups=1, size=2)
    with looking(browser, run) as look:
        look.open("run", "live")
        look.page.wait_for_selector(".state.stopped")
        assert look.page.locator("tr.train").count() == 1
        store = open_store(str(run / "lightning.db"))
        store.enqueue([Rollout(rollout_id="live-1:t1-0-0", group_id="live-1:t1-0", task={"q": "new"})])
        look.page.wait_for_selector("text=1 queued")
        assert look.page.locator("tr.train").count() == 2
        look.page.click("tr a >> text=step 2")
        look.page.wait_for_selector(".cell")
        (attempt,) = store.claim("runner", limit=1, lease_s=600)
        look.page.wait_for_selector(".state.running")
        look.page.click(".cell")
        look.page.wait_for_selector("text=Nothing was recorded")
        scene = Scene(attempt, Words(), random.Random(0), 0)
        scene.call(scene.agent("planner", None, 100), [user("go")], assistant("gone"))
        store.add_spans(scene.spans)
        store.add_calls(scene.calls)
        look.page.wait_for_selector(".event >> text=gone")
        store.finish_all([End(attempt.attempt_id, attempt.fence, "succeeded", (), None)])
        look.page.wait_for_selector(".state.stopped")
        store.close()
        look.well()


def test_the_calls_of_a_step_are_counted_while_it_goes_on(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", steps=1, groups=1, size=2)
    store = open_store(str(run / "lightning.db"))
    store.enqueue([Rollout(rollout_id="live-1:t1-0-0", group_id="live-1:t1-0", task={"q": "new"})])
    with looking(browser, run) as look:
        look.open("run", "live", "step", "train", 2)
        assert look.number("calls") == 0
        (attempt,) = store.claim("runner", limit=1, lease_s=600)
        scene = Scene(attempt, Words(), random.Random(0), 0)
        scene.call(scene.agent("planner", None, 100), [user("go")], assistant("gone"))
        store.add_spans(scene.spans)
        store.add_calls(scene.calls)
        store.finish_all([End(attempt.attempt_id, attempt.fence, "succeeded", (), None)])
        look.until("document.querySelector('[data-testid=calls]')?.textContent.startsWith('1 ')")
        store.close()


def test_rollouts_of_no_step_have_their_tools_and_rewards_too(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=1, groups=1, size=2)
    with closing(sqlite3.connect(run / "lightning.db")) as database, database:  # as an evaluation names them
        database.execute("UPDATE rollouts SET group_id = 'eval:' || substr(group_id, -1)")
    with looking(browser, run) as look:
        look.open("run", "r")
        look.page.click("nav >> text=Calls")
        look.page.wait_for_selector(".meter")
        assert "rollouts outside of steps" in look.text("h1")
        look.page.click("nav >> text=Rewards")
        look.page.wait_for_selector("table.rows button")
        look.well()


def test_enter_follows_the_link_that_has_the_focus(look: Looking) -> None:
    look.open("run", "calculator", "rollout", "calculator-0a1b2c3d:t1-0-1")
    look.page.wait_for_selector(".event.chosen")
    look.page.focus("nav >> text=Account")
    look.page.keyboard.press("Enter")
    look.page.wait_for_selector(".funnel")


def test_an_address_with_a_lone_percent_sign_breaks_nothing(look: Looking) -> None:
    look.open("run", "calculator")
    look.page.evaluate("location.hash = '/run/calculator/search/100%25%'")
    look.page.wait_for_selector("input[name=text]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_screen_breaks_a_rule_of_accessibility(browser: Any, runs: Path, scheme: str) -> None:
    rollout = "calculator-0a1b2c3d:t1-0-1"
    (chat, *_) = [line for line in printed(runs / "calculator", "--rollout", rollout) if line["operation"] == "chat"]
    call = f"call/{rollout}/{rollout}.1/{chat['span_id']}"
    screens = (
        "", "step/train/2", "group/calculator-0a1b2c3d:t1-0", f"rollout/{rollout}", call, "tries",
        "account/2", "credit/2", "rewards/train/2", "tools/train/2", "fleet", "search/multiply", "marks",
    )  # fmt: skip
    width = {"light": 1280, "dark": 390}[scheme]
    with looking(browser, runs, viewport={"width": width, "height": 800}, color_scheme=scheme) as look:
        broken = {}
        for screen in screens:
            look.open("run", "calculator", *filter(None, screen.split("/")))
            look.until("!document.querySelector('[aria-busy]')")
            look.page.wait_for_selector("main h1")
            broken[screen] = look.broken_rules()
        assert {screen: found for screen, found in broken.items() if found} == {}


def test_without_a_key_the_page_asks_for_one(browser: Any, runs: Path) -> None:
    with looking(browser, runs) as look:
        look.page.goto(f"{look.url}/view/")
        look.page.wait_for_selector("text=This page needs a key")
        look.page.fill("input[type=password]", look._key)
        look.page.click("text=Open")
        look.page.wait_for_selector("h1")
        assert look._key not in look.page.url


def test_a_key_that_is_pasted_into_the_address_of_an_open_page_opens_it(browser: Any, runs: Path) -> None:
    with looking(browser, runs) as look:
        look.page.goto(f"{look.url}/view/")
        look.page.wait_for_selector("text=This page needs a key")
        look.page.goto(f"{look.url}/view/#key={look._key}")
        look.page.wait_for_selector("h1")
        assert look._key not in look.page.url


def test_what_scrolls_sideways_on_a_phone_has_a_shadow_at_its_edge(browser: Any, runs: Path) -> None:
    with looking(browser, runs, viewport={"width": 390, "height": 800}) as look:
        look.open("run", "calculator", "tools", "train", 2)
        look.until("!document.querySelector('[aria-busy]')")
        without = look.page.evaluate("""[...document.querySelectorAll('*')].filter(one =>
            one.scrollWidth > one.clientWidth && getComputedStyle(one).overflowX === 'auto'
            && !getComputedStyle(one).backgroundAttachment.includes('local')).map(one => one.outerHTML.slice(0, 80))""")
        assert without == []
        look.well()


def test_it_is_read_on_a_phone_and_in_the_dark(browser: Any, runs: Path, picture: Any) -> None:
    phone = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark", "has_touch": True}
    with looking(browser, runs, **phone) as look:
        rollout = "calculator-0a1b2c3d:t1-0-1"
        for screen in ("", "step train 2", f"rollout {rollout}", "account 2"):
            where = f"run calculator {screen}"
            look.open(*where.split())
            look.until("!document.querySelector('[aria-busy]')")
            assert look.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), where
            assert look.page.evaluate("document.documentElement.dataset.theme") == "dark"
            if not screen:
                picture(look, "phone")
        look.well()


def test_view_prints_an_address_that_opens(browser: Any, runs: Path) -> None:
    command = [sys.executable, "-m", "lightning_trainer.cli", "view", str(runs / "calculator"), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector(".chart canvas")
        assert "key" not in page.url
        page.close()
    finally:
        process.terminate()
        assert process.wait(30) == 0
