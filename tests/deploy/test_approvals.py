"""A person's approval: no other key and no hand can make one, and without it a candidate is not promoted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightning_spans.errors import RefusedError
from lightning_spans.schema.json import to_json
from lightning_spans.store import open_store
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.auth.register import Register, register_of
from lightning_trainer.kits.deploy.approvals import APPROVAL, PATH
from lightning_trainer.kits.deploy.transitions import Note, approve, promote, roll_back
from support.cli import call, told
from support.gateway.deploy_site import Site, open_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path) as found:
        yield found


@pytest.mark.parametrize("over", ["server", "file"])
def test_a_candidate_that_needs_an_approval_is_promoted_after_it_and_not_before(site: Site, over: str) -> None:
    store = site.url if over == "server" else str(site.file)
    told(site.promote(store=store), "needs a person's approval", "deploy approve writer")
    approved = site.approve(site.key("approver"), "--candidate", "new", "--reason", "read 50 answers", "--json")
    assert approved.exit_code == 0, approved.output
    assert (json.loads(approved.stdout)["actor"], site.history()[-1].reason) == ("ada", "read 50 answers")
    assert (site.history()[-1].stage, site.history()[-1].share) == ("canary", 0.2), "the canary goes on as it was"
    assert site.deploy("canary", "--share", "30%").exit_code == 0
    assert site.promote(store=store).exit_code == 0
    assert site.history()[-1].stable == "new"
    assert site.deploy("rollback").exit_code == 0, "the way back needs nobody"


@pytest.mark.parametrize("scope", ["attempt", "runner", "evaluator", "live", "caller", "viewer", "admin"])
def test_no_other_key_can_approve(site: Site, scope: str) -> None:
    own = {"rollout_id": "r", "attempt_id": "a", "fence": 1} if scope == "attempt" else {}
    told(site.approve(site.key(scope, **own)), "not approved", f"scope '{scope}'", "approver")
    told(site.promote(), "needs a person's approval")


def test_an_approver_can_do_nothing_else(site: Site) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {site.key('approver').read_text()}"}) as client:
        for path in ("deployments", "assignments", "rewards", "rollouts", "delete", "query"):
            assert client.post(f"{site.url}/api/{path}", json={}).status_code == 403
        assert client.post(f"{site.url}/v1/chat/completions", json={}).status_code == 403


def forged(site: Site, how: str) -> Any:
    """Return what somebody writes in the place of an approval."""
    subject = [getattr(site.history()[0], name) for name in ("agent", "number", "at_ns", "candidate", "stable")]
    text = [*subject, None, None, "ada", None, 1]
    if how == "of another secret":
        return Keys.fresh().signer("approval").dumps(text)
    if how == "an approver's key":
        return site.keys.issue("approver", holder="ada").removeprefix("lk-")
    return {"said so": True, "number": 7, "nothing": "", "a text": "ada approved it"}[how]


@pytest.mark.parametrize("how", ["of another secret", "an approver's key", "said so", "number", "nothing", "a text"])
def test_an_approval_that_was_written_by_hand_does_not_count(site: Site, how: str) -> None:
    history = site.history()
    row = approve(history[-1], "writer", Note("approved", "ada", at_ns=1))
    site.write(replace(row, details={APPROVAL: forged(site, how)}))
    for store in (site.url, str(site.file)):
        told(site.promote(store=store), "needs a person's approval")


def test_an_approval_is_of_one_candidate_as_it_was_named(site: Site) -> None:
    told(site.approve(site.key("approver"), "--candidate", "newer"), "is 'new', not 'newer'")
    assert site.approve(site.key("approver")).exit_code == 0
    kept = site.history()[-1]
    for arguments in (("rollback",), ("candidate", "--model", "new"), ("canary",)):  # needs one, like the one before
        assert site.deploy(*arguments).exit_code == 0
    told(site.promote(), "needs a person's approval")
    site.write(replace(kept, number=len(site.history()) + 1))  # a copy of the old one
    told(site.promote(), "needs a person's approval")
    for arguments in (("rollback",), ("candidate", "--model", "new", "--no-approval"), ("canary",)):
        assert site.deploy(*arguments).exit_code == 0
    assert site.promote().exit_code == 0


def test_an_approval_of_a_revoked_key_does_not_count(site: Site) -> None:
    assert site.approve(site.key("approver")).exit_code == 0
    Register(register_of(site.folder / "lightning.key.secret")).revoke("ada")
    told(site.promote(store=str(site.file)), "needs a person's approval")


def test_a_server_refuses_a_promotion_however_it_is_sent(site: Site) -> None:
    history, note = site.history(), Note("because", "eve")
    promoted = promote(history[-1], "writer", note)
    renamed = replace(promoted, stage="canary", candidate="new", share=0.2)
    false_return = replace(roll_back(history, "writer", note), stable="new")
    with closing(open_store(site.url, key=(site.folder / "lightning.key").read_text())) as store:
        for row in (promoted, renamed, false_return):
            with pytest.raises(RefusedError, match="needs a person's approval"):
                store.add_deployments([row])
        body = {"deployments": [to_json(replace(promoted, number=number)) for number in (3, 4)]}
        admin = {"authorization": f"Bearer {(site.folder / 'lightning.key').read_text()}"}
        assert httpx.post(f"{site.url}/api/deployments", json=body, headers=admin).status_code == 400
    assert site.history() == history


def test_what_an_approval_needs_is_said(site: Site, tmp_path: Path) -> None:
    told(call("deploy", "approve", "writer", "--store", site.file), "URL of the server")
    told(call("deploy", "approve", "reader", "--store", site.url, "--key-file", site.key("approver")), "no candidate")
    elsewhere = tmp_path / "elsewhere.key"
    elsewhere.write_text("lk-x")
    told(site.promote(store=str(site.file), key=elsewhere.name), "server's secret")
    assert httpx.post(f"{site.url}{PATH}", json={"agent": "writer"}).status_code == 401
