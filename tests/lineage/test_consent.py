"""Live traces are learned from only with consent, within their retention, and never two tenants at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans import data_terms
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError, DataError
from lightning_spans.record.production import read_live
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import Span
from lightning_spans.store import open_store
from lightning_spans.terms import CONSENT, RETENTION, SOURCE, TENANT, join_terms, make_terms
from lightning_trainer.cli import cli
from lightning_trainer.gateway.auth.keys import Grant, Keys
from lightning_trainer.gateway.auth.quotas import Quotas
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.ingest.otlp import sort
from lightning_trainer.gateway.request.pending import begin
from lightning_trainer.gateway.settings import Limits
from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.kits.sft.sft import read
from lightning_trainer.lineage.permits import Permits, UnpermittedReason, tenants_of

DAY_NS = 86_400 * 10**9


def a_span(number: int, *, age_days: float = 0.0, origin: str = "live", **terms: Any) -> Span:
    """A live call of a model, a trace by itself."""
    end_ns = time.time_ns() - int(age_days * DAY_NS)
    request = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
    answer = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}]}
    texts = {"lightning.request": json.dumps(request), "lightning.response": json.dumps(answer)}
    return Span(
        operation="chat", name="m", trace_id=f"{number:032x}", span_id=f"{number:016x}", start_ns=end_ns - 1,
        end_ns=end_ns, origin=origin, agent="writer", attributes={**texts, **make_terms(**terms)},
    )  # fmt: skip


def grant(**terms: Any) -> Grant:
    keys = Keys.fresh()
    return keys.check(keys.issue("caller", holder="shop", terms=make_terms(**terms)))


def run(*arguments: str, fails: bool = False) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert (result.exit_code != 0) == fails, result.output
    return result.output


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_export_and_tasks_hold_only_what_is_permitted_and_count_the_rest(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "s.db") if kind == "sqlite" else request.getfixturevalue("fresh_postgres")()
    store = open_store(url)
    store.add_spans(
        [
            a_span(1, tenant="acme", consent=True, source="web"),
            a_span(2, tenant="acme"),
            a_span(3, tenant="acme", consent=False),
            a_span(4, tenant="acme", consent=True, retention_days=1, age_days=2),
            a_span(5, tenant="globex", consent=True),
            a_span(6, origin="training"),
        ]
    )
    store.close()
    out, tasks = tmp_path / "out.jsonl", tmp_path / "tasks.jsonl"
    export = ["export", str(out), "--format", "sft", "--store", url]
    to_tasks = ["traces", "--to-tasks", str(tasks), "--store", url]
    for command in (export, to_tasks):
        assert "2 tenants: acme, globex. Choose one with --tenant NAME" in run(*command, fails=True)
    assert not out.exists()
    assert not tasks.exists()
    told = json.loads(run(*export, "--tenant", "acme").splitlines()[-1])
    assert told["left_out"] == {
        UnpermittedReason.UNSTATED: 1,
        UnpermittedReason.DENIED_TRACE: 1,
        UnpermittedReason.EXPIRED: 1,
        UnpermittedReason.OTHER_TENANT: 2,
    }
    assert [json.loads(line)["tenant"] for line in out.read_text().splitlines()] == ["acme"]
    assert f"1 trace left out: {UnpermittedReason.DENIED_TRACE}" in run(
        *to_tasks, "--tenant", "acme", "--assume-consent"
    )
    assert [json.loads(line)["trace_id"] for line in tasks.read_text().splitlines()] == [f"{n:032x}" for n in (1, 2)]
    run(*to_tasks, "--mix-tenants")
    assert [json.loads(line).get("tenant") for line in tasks.read_text().splitlines()] == ["acme", "globex", None]
    assert "deleted: 1" in run("prune", "--expired", "--yes", "--store", url)
    assert "deleted: 0" in run("prune", "--expired", "--yes", "--store", url)


@pytest.mark.parametrize("loss", ["likelihood", "dpo"])
def test_sft_on_exported_files_learns_only_from_the_chosen_tenant(tmp_path: Path, loss: str) -> None:
    url, both, other = str(tmp_path / "s.db"), tmp_path / "both.jsonl", tmp_path / "globex.jsonl"
    store = open_store(url)
    store.add_spans([a_span(n, tenant=name, consent=True) for n, name in enumerate(("acme", "globex"), 1)])
    store.close()
    run("export", str(both), "--format", "sft", "--store", url, "--mix-tenants")
    run("export", str(other), "--format", "sft", "--store", url, "--tenant", "globex")
    own = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "origin": "docs"}
    both.write_text(f"{both.read_text()}{json.dumps(own)}\n")
    if loss == "dpo":
        for path in (both, other):
            path.write_text("".join(json.dumps(as_pair(json.loads(line))) + "\n" for line in path.open()))

    def tenants(data: Path, **options: Any) -> tuple[list[set[str]], dict[str, int]]:
        read_data = read(SftConfig(data=(str(data),), model="m", loss=loss, held_out=0, **options))
        return [example.tenants for example in read_data.training], dict(read_data.left_out)

    left_out = {UnpermittedReason.OTHER_TENANT: 1}
    assert tenants(both, tenant="acme") == ([{"acme"}, set()], left_out)
    assert tenants(both, mix_tenants=True) == ([{"acme"}, {"globex"}, set()], {})
    with pytest.raises(DataError, match=f"globex.jsonl: no line may be learned from(?s:.*){left_out.popitem()[0]}"):
        tenants(other, tenant="acme")
    with pytest.raises(DataError, match=r"--val .*globex.jsonl: no line"):
        tenants(both, tenant="acme", val=other)


def as_pair(line: dict[str, Any]) -> dict[str, Any]:
    """A pair of two answers, made from the same trace as a conversation."""
    *prompt, answer = line["messages"]
    kept = {name: line[name] for name in ("origin", "tenant") if name in line}
    kept["chosen_from"] = kept["rejected_from"] = {name: line.get(name) for name in ("attempt_id", "trace_id")}
    worse = {"role": "assistant", "content": "no"}
    return {"prompt": prompt, "chosen": [answer], "rejected": [worse], **kept}


def test_a_tenant_without_traces_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    url = str(tmp_path / "s.db")
    store = open_store(url)
    store.add_spans([a_span(1, tenant="acme"), a_span(2, tenant="globex")])
    store.close()
    prune = ["prune", "--yes", "--store", url, "--tenant"]
    said = run(*prune, "acmee", fails=True)
    assert "names the tenant 'acmee'" in said
    assert "Did you mean 'acme'? Tenants here: acme, globex." in said
    assert "deleted: 1" in run(*prune, "acme")
    assert "deleted: 0" in run(*prune, "globex", "--expired"), "nothing of a known tenant may have expired"


def test_traces_are_shown_with_the_id_that_other_commands_take(tmp_path: Path) -> None:
    url = str(tmp_path / "s.db")
    store = open_store(url)
    store.add_spans([a_span(1), a_span(2)])
    ids = {"call_id": "lone", "response_id": "lone", "policy": "m", "policy_version": 0}
    store.add_calls([Call(**ids, start_ns=1, end_ns=2, origin="live")])
    store.close()
    shown = run("traces", "--store", url)
    assert "call lone  outside a runner" in shown
    trace = f"{1:032x}"
    assert f"trace {trace}  outside a runner" in shown
    assert run("traces", "--store", url, "--trace", trace).count("outside a runner") == 1
    assert "there is no trace none" in run("traces", "--store", url, "--trace", "none", fails=True)
    assert "No checkpoint" in run("lineage", trace, "--store", url)
    assert "deleted: 1" in run("prune", "--yes", "--store", url, "--trace", trace)
    assert "deleted: 1" in run("prune", "--yes", "--store", url, "--call", "lone")


@given(
    traces=st.lists(
        st.tuples(st.sampled_from([None, "acme", "globex"]), st.sampled_from([None, True, False]), st.integers(0, 2)),
        max_size=12,
    ),
    tenant=st.sampled_from([None, "acme", "globex"]),
    assumed=st.booleans(),
)
def test_no_selection_mixes_tenants_or_holds_what_is_not_permitted(
    traces: list[tuple[str | None, bool | None, int]], tenant: str | None, assumed: bool
) -> None:
    permits = Permits(tenant=tenant, assume_consent=assumed)
    made = [
        (name, consent, Trace.build([a_span(n, tenant=name, consent=consent, retention_days=1, age_days=age)]))
        for n, (name, consent, age) in enumerate(traces, 1)
    ]
    taken = [one for one in made if permits.reason_against(one[2]) is None]
    assert all(consent or (consent is None and assumed) for _, consent, _ in taken)
    tenants = {name for _, _, trace in taken for name in tenants_of(trace)}
    try:
        permits.check_tenants(tenants)
    except ConfigError:
        return
    assert len(tenants) <= 1
    assert tenant is None or tenants <= {tenant}


def test_a_trace_that_two_tenants_sent_is_of_neither() -> None:
    one, other = a_span(1, tenant="acme", consent=True), a_span(1, tenant="globex", consent=True)
    trace = Trace.build([one, Span(**{**_fields(other), "span_id": "f" * 16})])
    assert Permits().reason_against(trace) == UnpermittedReason.SEVERAL_TENANTS
    assert Permits(tenant="acme").reason_against(trace) == UnpermittedReason.SEVERAL_TENANTS


def _fields(span: Span) -> dict[str, Any]:
    return {name: getattr(span, name) for name in Span.__dataclass_fields__}


def test_a_keys_tenant_replaces_what_the_program_says_and_the_stricter_term_counts() -> None:
    key = grant(tenant="globex", consent=True, retention_days=7)
    [span] = sort([a_span(1, tenant="acme", consent=False, retention_days=30, source="web")], key).taken
    assert {name: span.attributes[name] for name in (TENANT, CONSENT, RETENTION, SOURCE)} == {
        TENANT: "globex", CONSENT: "denied", RETENTION: 7.0, SOURCE: "web",
    }  # fmt: skip
    headers = {b"x-lightning-tenant": b"acme", b"x-lightning-source": b"phone"}
    call = begin({}, key, headers, "policy").requested
    assert call.terms == {TENANT: "globex", CONSENT: "granted", RETENTION: 7.0, SOURCE: "phone"}
    with pytest.raises(Refusal, match="give granted or denied"):
        begin({}, key, {b"x-lightning-consent": b"yes"}, "policy")
    assert join_terms({RETENTION: "soon"}, {}) == {RETENTION: 0.0}


def test_keys_of_one_tenant_share_a_quota() -> None:
    quotas = Quotas(Limits(live_spans=10))
    quotas.take(grant(tenant="acme"), "spans", 6)
    with pytest.raises(Refusal):
        quotas.take(grant(tenant="acme"), "spans", 6)
    quotas.take(grant(tenant="globex"), "spans", 6)
    quotas.take(grant(), "spans", 6)


def test_a_program_states_terms_for_a_request_or_for_all_of_them(tmp_path: Path) -> None:
    import lightning_openai
    from lightning_spans import agent

    with lightning_openai.attach(store=str(tmp_path / "s.db"), tracer="embedded"):
        with data_terms(tenant="acme", consent=True), data_terms(retention_days=30), agent("writer"):
            pass
        with agent("writer"):
            pass
    store = open_store(str(tmp_path / "s.db"))
    stated, silent = store.spans()
    store.close()
    assert (stated.attributes[TENANT], stated.attributes[CONSENT], stated.attributes[RETENTION]) == (
        "acme", "granted", 30.0,
    )  # fmt: skip
    assert TENANT not in silent.attributes
    live = read_live({"LIGHTNING_TENANT": "acme", "LIGHTNING_CONSENT": "denied"})
    assert live.prepare(a_span(1, tenant="globex"), None).attributes[TENANT] == "globex"
    assert live.prepare(a_span(1), None).attributes[CONSENT] == "denied"
    with pytest.raises(ConfigError, match="give granted or denied"):
        read_live({"LIGHTNING_CONSENT": "yes"})
