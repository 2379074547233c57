"""A checkpoint's adapters on a vLLM that runs: loaded under names of their own, and answered for under the agents'."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import httpx
import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.adapters import adapters_in, load_adapters
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.models.bases import NEEDED, ROUNDED, NumberFormat, write_format
from support.fakes import served
from support.gateway.lora_server import NAMES, Vllm, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "run" / "checkpoint")


@pytest.fixture
def vllm():
    scripted = Vllm()
    scripted.url = f"{scripted.thread.start()}/v1"
    yield scripted
    scripted.may_end.set()
    scripted.thread.stop()


@contextmanager
def gateway(folder, checkpoint, vllm):
    folder.mkdir(exist_ok=True)
    base = Upstream("base", vllm.url)
    upstreams = [base, *load_adapters(checkpoint, [base])]
    with served(folder, upstreams=upstreams, routing=Routing(model="base")) as front:

        def post(path, body, key):
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{front.url}{path}", json=body, headers=headers, timeout=60)

        chat = {"messages": [{"role": "user", "content": "hi"}]}
        front.ask = lambda model: post("/v1/chat/completions", {"model": model, **chat}, front.key("a"))
        front.say = lambda model: front.ask(model).json()["choices"][0]["message"]["content"]
        front.replace = lambda place, **more: post(
            "/api/policies/adapters", {"checkpoint": str(place), **more}, front.keys.issue("admin")
        )
        yield front


def test_every_server_loads_every_adapter_under_a_name_of_its_content(checkpoint, vllm):
    base = Upstream("base", vllm.url, key="k", replicas=(vllm.url,))
    found = load_adapters(checkpoint.parent, [base])
    assert [(one.model, one.url, one.replicas, one.key) for one in found] == [
        (name, vllm.url, (vllm.url,), "k") for name in NAMES
    ]
    assert [one.served for one in found] == [each.served for each in adapters_in(checkpoint)]
    assert vllm.contents == {one.served: (f"{one.model} first", str(checkpoint / one.model)) for one in found}
    assert vllm.keys == {"Bearer k"}


def test_a_newer_checkpoint_is_not_answered_from_the_cache_of_the_one_before(checkpoint, vllm, tmp_path):
    with gateway(tmp_path / "front", checkpoint, vllm) as front:
        assert [front.say(name) for name in NAMES] == ["writer first", "rewriter first"]
    write_checkpoint(checkpoint, "second")
    with gateway(tmp_path / "again", checkpoint, vllm) as front:
        assert [front.say(name) for name in NAMES] == ["writer second", "rewriter second"]
    assert len(vllm.contents) == 2, "earlier contents are unloaded"


def test_adapters_are_replaced_under_way_and_the_number_loaded_stays_bounded(checkpoint, vllm, tmp_path):
    with gateway(tmp_path / "front", checkpoint, vllm) as front:
        for number in range(12):
            newer = write_checkpoint(tmp_path / f"newer{number}", str(number))
            reply = front.replace(newer, version=number)
            assert [policy["version"] for policy in reply.json()["policies"]] == [number, number]
            assert [front.say(name) for name in NAMES] == [f"writer {number}", f"rewriter {number}"]
            assert front.calls("a")[-1].policy_version == number
    assert vllm.most <= 6, "new, newest, and what is being unloaded"


def test_a_call_ends_on_the_adapter_that_it_began_with_which_is_then_unloaded(checkpoint, vllm, tmp_path):
    before, other = (each.served for each in adapters_in(checkpoint))
    with gateway(tmp_path / "front", checkpoint, vllm) as front:
        vllm.may_end.clear()
        said = []
        thread = threading.Thread(target=lambda: said.append(front.say("writer")))
        thread.start()
        assert vllm.begun.wait(60)
        reply = front.replace(write_checkpoint(tmp_path / "newer", "second"))
        served_now = [policy["served"] for policy in reply.json()["policies"]]
        assert [len(names) for names in served_now] == [2, 1]
        assert vllm.unloaded.get(timeout=60) == other
        assert before in vllm.contents
        vllm.may_end.set()
        thread.join(60)
        assert vllm.unloaded.get(timeout=60) == before
        assert (said, front.say("writer")) == (["writer first"], "writer second")


def test_contents_that_come_back_while_a_call_uses_them_stay_loaded(checkpoint, vllm, tmp_path):
    newer = write_checkpoint(tmp_path / "newer", "second")
    with gateway(tmp_path / "front", checkpoint, vllm) as front:
        vllm.may_end.clear()
        thread = threading.Thread(target=lambda: front.say("writer"))
        thread.start()
        assert vllm.begun.wait(60)
        front.replace(newer)
        front.replace(checkpoint)
        vllm.may_end.set()
        thread.join(60)
        assert [front.say(name) for name in NAMES] == ["writer first", "rewriter first"]


def test_only_an_admin_replaces_adapters_and_only_those_that_are_served(checkpoint, vllm, tmp_path):
    with gateway(tmp_path / "front", checkpoint, vllm) as front:
        assert front.replace(tmp_path).status_code == 400
        assert front.replace(checkpoint, model="writer").status_code == 400
        assert front.replace(write_checkpoint(tmp_path / "more", names=("judge",))).status_code == 404
        headers = {"authorization": f"Bearer {front.key('a')}"}
        body = {"checkpoint": str(checkpoint)}
        assert httpx.post(f"{front.url}/api/policies/adapters", json=body, headers=headers).status_code == 403


def test_too_small_limits_of_vllm_are_refused_with_the_numbers_needed(checkpoint, vllm):
    base = Upstream("base", vllm.url)
    write_checkpoint(checkpoint, rank=48)
    with pytest.raises(ConfigError, match=r"whose rank is 48: .* Start vLLM with --max-lora-rank 64\."):
        load_adapters(checkpoint, [base])
    write_checkpoint(checkpoint, names=(*NAMES, "judge"))
    with pytest.raises(ConfigError, match=r"2 adapters at the same time, and 3 .*\. Start vLLM with --max-loras 3"):
        load_adapters(checkpoint, [base])


def test_what_vllm_says_against_an_adapter_is_told(checkpoint, vllm):
    (checkpoint / "writer" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"did not load the adapter writer@\w+ from .*writer: status 500"):
        load_adapters(checkpoint, [Upstream("base", vllm.url)])


def test_server_that_loads_no_adapters_is_told_how_to_start(checkpoint, vllm):
    with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora"):
        load_adapters(checkpoint, [Upstream("base", vllm.url.replace("/v1", "/v2"))])
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9/v1/models did not answer"):
        load_adapters(checkpoint, [Upstream("base", "http://127.0.0.1:9/v1")])


def test_what_is_no_checkpoint_of_adapters_or_has_no_one_base_is_refused(checkpoint, tmp_path):
    one = Upstream("base", "http://127.0.0.1:9/v1")
    for upstreams, words in (([], "0 are given"), ([one, one], "2 are given")):
        with pytest.raises(ConfigError, match=words):
            load_adapters(checkpoint, upstreams)
    with pytest.raises(ConfigError, match="has the name of an adapter"):
        load_adapters(checkpoint, [Upstream("writer", one.url)])
    with pytest.raises(ConfigError, match=r"has no adapters\.json"):
        load_adapters(tmp_path, [one])
    (checkpoint / "writer" / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="names the adapter writer, but"):
        load_adapters(checkpoint, [one])


def test_adapters_of_rounded_weights_are_loaded_over_the_same_ones_alone(checkpoint, vllm, tmp_path):
    for name in NAMES:
        write_format(checkpoint / name / NEEDED, NumberFormat(4))
    vllm.model = str(tmp_path / "model")
    for bits in (None, 8):
        (tmp_path / "model").mkdir(exist_ok=True)
        write_format(tmp_path / "model" / ROUNDED, NumberFormat(bits))
        with pytest.raises(ConfigError, match=r"over weights of 4 bits, and .* serves .*/model, which is not known"):
            load_adapters(checkpoint, [Upstream("base", vllm.url)])
    assert not vllm.contents
    write_format(tmp_path / "model" / ROUNDED, NumberFormat(4))
    load_adapters(checkpoint, [Upstream("base", vllm.url)])
    assert len(vllm.contents) == len(NAMES)
