"""Actions on the viewer's page: one kind of key makes them, every safeguard holds, and what has changed is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import open_store
from lightning_trainer.gateway.auth.keys import Scope
from lightning_trainer.kits.deploy.acting.route import BY_KEY, PATH
from lightning_trainer.kits.deploy.outcomes import GATE
from lightning_trainer.kits.deploy.transitions import Note, Policy, begin_canary, name_candidate, roll_back
from lightning_trainer.lineage.blocks import block_checkpoint
from support.deployments import fill_canary
from support.gateway.deploy_site import Site, open_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path) as found:
        yield found


def act(site: Site, action: str, *, scope: Any = "deployer", headers: Any = None, **body: Any) -> httpx.Response:
    own = {"rollout_id": "r", "attempt_id": "a", "fence": 1} if scope == "attempt" else {}
    key = site.issue(scope, **own)  # in no file, which two threads would write at once
    body = {"agent": "writer", "action": action, "number": site.history()[-1].number, **body}
    return httpx.post(f"{site.url}{PATH}", json=body, headers={"authorization": f"Bearer {key}", **(headers or {})})


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("scope", [scope for scope in get_args(Scope) if scope != "deployer"])
@pytest.mark.parametrize("action", ["canary", "rollback", "promote"])
def test_no_other_key_changes_a_deployment_through_the_page(site: Site, scope: str, action: str) -> None:
    history = site.history()
    assert "deployer" in refused(act(site, action, scope=scope, share=0.9), 403)
    assert site.history() == history


def test_without_a_key_or_with_a_revoked_one_nothing_changes(site: Site) -> None:
    history = site.history()
    body = {"agent": "writer", "action": "rollback", "number": 2}
    assert httpx.post(f"{site.url}{PATH}", json=body).status_code == 401
    assert refused(act(site, "rollback", headers={"authorization": "Bearer lk-x"}), 401)
    assert site.history() == history


def test_a_deployers_key_opens_nothing_else(site: Site) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {site.key('deployer').read_text()}"}) as client:
        for path in ("deployments", "deployments/approve", "assignments", "rewards", "rollouts", "delete", "query"):
            assert client.post(f"{site.url}/api/{path}", json={}).status_code == 403, path
        assert client.post(f"{site.url}/v1/chat/completions", json={}).status_code == 403
        for path in ("runs", "deployments?run=store", "findings?run=store&agent=writer"):
            assert client.get(f"{site.url}/api/view/{path}").status_code == 403, path


def test_each_action_is_one_row_with_the_person_of_the_key(site: Site) -> None:
    assert act(site, "rollback", reason=" complaints ").status_code == 200
    assert site.deploy("candidate", "--model", "new", "--no-approval").exit_code == 0
    shadow = act(site, "shadow", share=0.2).json()["deployment"]
    canary = act(site, "canary", share=0.05, outcomes=["user"], guards={"failed": 0.02}).json()["deployment"]
    rows = site.history()[2:]
    assert [(row.number, row.stage, row.share, row.actor) for row in rows] == [
        (3, "rolled_back", 0.0, "ada"), (4, "candidate", 0.0, rows[1].actor), (5, "shadow", 0.2, "ada"),
        (6, "canary", 0.05, "ada"),
    ]  # fmt: skip
    assert (rows[0].reason, shadow["number"], canary["number"]) == ("complaints", 5, 6)
    assert rows[2].details[SHADOW] == {"rules": ["refused", "cut"], "judge": None}
    assert (rows[3].details[GATE]["sources"], rows[3].details[GATE]["guardrails"]) == (["user"], {"failed": 0.02})
    assert all(row.details[BY_KEY] for row in (rows[0], *rows[2:]))
    for wrong in ({"actor": "grace"}, {"override": True}, {"allow_blocked": True}):
        assert act(site, "promote", **wrong).status_code in (400, 422)
    assert len(site.history()) == 6


def test_what_a_canary_or_a_shadow_compares_stays_when_its_share_changes(site: Site) -> None:
    assert "fixed since" in refused(act(site, "canary", share=0.3, guards={"failed": 0.02}))
    assert "above 0" in refused(act(site, "canary", share=0.0))
    assert "give the share" in refused(act(site, "canary"))
    assert "in a canary already" in refused(act(site, "shadow", share=0.1))
    assert act(site, "canary", share=0.3).status_code == 200
    assert act(site, "rollback").status_code == 200
    for words in (("candidate", "--model", "new"), ("shadow", "--rule", "cut")):
        assert site.deploy(*words).exit_code == 0
    assert act(site, "shadow", share=0.5).status_code == 200
    assert site.history()[-1].details[SHADOW]["rules"] == ["cut"]


def test_what_has_changed_since_the_page_was_drawn_is_refused(site: Site) -> None:
    assert act(site, "canary", share=0.3).status_code == 200
    history = site.history()
    assert "changed meanwhile (canary, by ada)" in refused(act(site, "rollback", number=2), 409)
    assert site.history() == history
    answers: list[int] = []
    start = threading.Barrier(2)

    def press() -> None:
        start.wait()
        answers.append(act(site, "rollback", number=3).status_code)

    pressing = [threading.Thread(target=press) for _ in range(2)]
    for one in pressing:
        one.start()
    for one in pressing:
        one.join()
    assert sorted(answers)[0] == 200
    assert sorted(answers)[1] in (400, 409)
    assert [row.stage for row in site.history()] == ["candidate", "canary", "canary", "rolled_back"]


def test_a_promotion_needs_the_gate_and_a_persons_approval(site: Site) -> None:
    assert "0 outcomes of new" in refused(act(site, "promote"))
    with closing(open_store(str(site.file))) as store:
        fill_canary(store, site.history(), good=0.9, talks=400)
    assert "needs a person's approval" in refused(act(site, "promote"))
    assert site.approve(site.key("approver")).exit_code == 0
    assert act(site, "promote", reason="a good week").status_code == 200
    newest = site.history()[-1]
    assert (newest.stage, newest.stable, newest.actor) == ("stable", "new", "ada")
    assert newest.details["evidence"]["decision"] == "promote"
    assert act(site, "rollback").status_code == 200


def test_the_page_says_that_the_server_does_not_have_the_candidate(site: Site) -> None:
    key = {"authorization": f"Bearer {site.issue('viewer')}"}

    def missing() -> list[str]:
        where = {"run": "store", "agent": "writer"}
        return list(httpx.get(f"{site.url}/api/view/findings", params=where, headers=key).json()["missing"])

    assert not any("a server with" in line for line in missing())
    assert act(site, "rollback").status_code == 200
    site.write(name_candidate(site.history()[-1], "writer", Policy("removed"), Note("", "ada")))
    assert missing()[0].startswith("a server with removed. This one does not have it")


def test_a_blocked_or_unseen_checkpoint_is_not_promoted(site: Site, tmp_path: Path) -> None:
    adapter = tmp_path / "run" / "writer"
    for place, folder in enumerate((adapter, tmp_path / "elsewhere")):
        history, note = site.history(), Note("because", "eve", at_ns=place)
        rows = [roll_back(history, "writer", note)]
        rows.append(name_candidate(rows[-1], "writer", Policy(f"a{place}", str(folder), "old"), note))
        rows.append(replace(begin_canary(rows[-1], "writer", 0.2, note), details=history[1].details))
        for row in rows:
            site.write(row)
        if folder == adapter:
            adapter.mkdir(parents=True)
            block_checkpoint(adapter, "it learned from a deleted call")
            assert "is blocked: it learned from a deleted call" in refused(act(site, "promote"))
        else:
            assert "does not see" in refused(act(site, "promote"))
    assert site.history()[-1].stage == "canary"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_a_page_of_another_site_changes_nothing(site: Site, headers: dict[str, str], status: int) -> None:
    history = site.history()
    assert refused(act(site, "rollback", headers=headers), status)
    assert site.history() == history
    own = {"origin": site.url, "sec-fetch-site": "same-origin", "content-type": "application/json; charset=utf-8"}
    assert act(site, "rollback", headers=own).status_code == 200
