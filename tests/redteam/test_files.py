"""Attacks with files: by other users of the machine, and by model folders that somebody made to be loaded."""

from __future__ import annotations

import json
import os
import pickle
import stat
import struct
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.schema.spans import Span
from lightning_spans.store import open_store
from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.auth.register import write_private
from lightning_trainer.gateway.http.serving import ServerThread, Tls
from lightning_trainer.kits.view import command as view_command
from lightning_trainer.models import check_folder
from lightning_trainer.session.folder import make_folder
from support.models.tiny import make_tiny_model


@pytest.fixture(autouse=True)
def careless_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def others(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o077


def a_span() -> Span:
    return Span(operation="chat", name="chat", trace_id="a" * 32, span_id="b" * 16, start_ns=1, end_ns=2)


def test_others_on_the_machine_can_not_read_a_new_store_a_spool_or_a_key(tmp_path):
    store = open_store(str(tmp_path / "lightning.db"))
    store.add_spans([a_span()])
    Spool(tmp_path / "spool").append("http://127.0.0.1:1", "key", [a_span()])
    Keys.from_file(tmp_path / "keys" / "admin.secret")
    write_private(tmp_path / "keys" / "admin.key", "key")
    found = [path for path in tmp_path.rglob("*") if path.name != "pytest"]
    assert {path.name for path in found} >= {"lightning.db", "lightning.db-wal", "lightning.db-turn", "admin.key"}
    assert [path for path in found if others(path)] == []
    store.close()


def test_others_on_the_machine_can_not_look_into_new_folders_of_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [make_folder(None, tmp_path / "runs"), make_folder(tmp_path / "out", tmp_path / "runs")]
    assert [others(folder) for folder in made] == [0] * len(made)


def test_a_tls_key_that_every_user_may_read_is_refused(tmp_path):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("")
    (tmp_path / "key.pem").chmod(0o644)
    thread = ServerThread(lambda *_: None, tls=Tls(tmp_path / "cert.pem", tmp_path / "key.pem"))
    for look in (thread.check, thread.start):
        with pytest.raises(ConfigError, match="chmod 600"):
            look()


def test_the_command_line_of_a_browser_has_no_key(tmp_path, monkeypatch):
    opened, keys = [], Keys.fresh()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", opened.append)
    key = keys.issue("viewer")
    view_command._show(f"http://127.0.0.1:1/view/#key={key}</script>", opened=True)
    assert key not in opened[0]
    (page,) = tmp_path.rglob("view.html")
    assert opened == [page.as_uri()]
    assert key in page.read_text()
    assert page.read_text().count("</script>") == 1
    assert others(page) == 0


def test_a_browser_gets_no_key_that_opens_more_than_the_viewer(monkeypatch):
    keys = Keys.fresh()
    monkeypatch.setattr("httpx.get", lambda *_, **__: httpx.Response(200))
    assert "#key=lk-" in view_command._page_of("https://server", keys.issue("viewer"))
    for key in (keys.issue("admin"), keys.issue("runner"), "lk-nonsense", ""):
        with pytest.raises(ConfigError, match="key viewer"):
            view_command._page_of("https://server", key)


def test_what_needs_a_key_is_kept_by_no_browser_and_no_proxy(ask, server):
    answer = ask("GET", "/api/attempts", server.keys.issue("admin"))
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")


def test_a_store_that_is_shared_on_purpose_stays_shared(tmp_path):
    path = tmp_path / "shared.db"
    open_store(str(path)).close()
    (tmp_path / "shared.db-turn").unlink()
    path.chmod(0o660)
    store = open_store(str(path))
    store.add_spans([a_span()])
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob("shared.db*")} == {0o660}
    store.close()


class Payload:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self):
        return (Path.touch, (self._proof,))


@pytest.fixture
def model(tmp_path) -> Path:
    return make_tiny_model(tmp_path / "model")


def load(folder: Path) -> None:
    TorchLearner(folder, device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10_000_000},
        {"text_config": {"n_layers": 10**30}},
        {"padding": "x" * (21 << 20)},
        [],
        "deep",
    ],
    ids=["layers", "nested", "long", "list", "deep"],
)
def test_a_configuration_without_end_is_refused_before_anything_is_built(model, config):
    check_folder(model)
    text = "[" * 100_000 if config == "deep" else json.dumps(config)
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_folder(model)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "adapter_model.bin", "training_args.bin"])
def test_a_pickle_in_a_model_folder_is_never_read(model, tmp_path, name, kept):
    proof = tmp_path / "ran"
    (model / name).write_bytes(pickle.dumps(Payload(proof)))
    if not kept:
        (model / "model.safetensors").rename(model / "other.safetensors")  # so that only the pickle has the name
        with pytest.raises(ConfigError):
            load(model)
    else:
        load(model)
    assert not proof.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_a_model_folder_brings_is_never_run_nor_asked_about(model, tmp_path, file, monkeypatch):
    proof = tmp_path / "ran"
    (model / "evil.py").write_text(f"import pathlib\npathlib.Path({str(proof)!r}).touch()\nclass Evil: pass\n")
    config = json.loads((model / file).read_text())
    kinds = ("AutoConfig", "AutoModelForCausalLM") if file == "config.json" else ("AutoTokenizer",)
    config["auto_map"] = {kind: ["evil.Evil", None] if kind == "AutoTokenizer" else "evil.Evil" for kind in kinds}
    config |= {"model_type": "evil"} if file == "config.json" else {"tokenizer_class": "Evil"}
    (model / file).write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    with suppress(ConfigError):  # or it is loaded without that code
        load(model)
    assert not proof.exists()


HEADERS = {
    "huge": struct.pack("<Q", 2**63 - 1) + b"{}",
    "longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    "nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "overlapping": None,
    "empty": b"",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_malformed_safetensors_file_is_a_clear_error(model, kind):
    data = HEADERS[kind]
    if data is None:
        one = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}
        header = json.dumps({"a": one, "b": {**one, "data_offsets": [-8, 8]}}).encode()
        data = struct.pack("<Q", len(header)) + header + b"\0" * 8
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=str(model)):
        load(model)


@pytest.fixture
def adapters(model, tmp_path) -> Path:
    """A checkpoint of an adapter."""
    backend = TorchLearner(model, device="cpu", adapters=("writer",), lora_rank=2)
    backend.save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


ODD_ADAPTERS = [
    {"alpha_pattern": "text"}, {"rank_pattern": None}, {"bias": -1}, {"init_lora_weights": {"a": 1}},
    {"megatron_config": {"a": 1}, "megatron_core": "payload"},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_ADAPTERS, ids=lambda odd: next(iter(odd)))
def test_options_of_an_adapter_of_another_type_are_one_error_and_import_nothing(adapters, monkeypatch, odd):
    (adapters.parent / "payload.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(adapters.parent)
    path = adapters / "writer" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    with pytest.raises(ConfigError, match="writer"):
        load(adapters)


@pytest.mark.parametrize(
    ("file", "odd"),
    [("config.json", {"max_position_embeddings": 10**18}), ("generation_config.json", {"eos_token_id": {"a": 1}})],
)
def test_numbers_of_a_model_that_are_none_are_one_error(model, file, odd):
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    with pytest.raises(ConfigError, match=next(iter(odd)) if file == "config.json" else "not a token id"):
        load(model)


def test_a_pickle_in_place_of_an_adapter_is_never_read(adapters, tmp_path):
    proof = tmp_path / "ran"
    (adapters / "writer" / "adapter_model.safetensors").unlink()
    (adapters / "writer" / "adapter_model.bin").write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(ConfigError, match="pickle files are never read"):
        load(adapters)
    assert not proof.exists()


@pytest.mark.parametrize("data", [header for header in HEADERS.values() if header is not None])
def test_a_malformed_adapter_is_a_clear_error(adapters, data):
    (adapters / "writer" / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="writer"):
        load(adapters)


@pytest.mark.parametrize("name", ["..", ".", "", "../outside", "/etc", "writer/../../outside", "linked", "a/b"])
def test_an_adapter_is_read_from_no_other_folder(adapters, tmp_path, name):
    """Neither by a name with a path in it nor through a link."""
    outside = tmp_path / "outside"
    (adapters / "writer").rename(outside)
    (adapters / "linked").symlink_to(outside)
    index = next(path for path in adapters.glob("*.json") if "adapters" in json.loads(path.read_text()))
    index.write_text(json.dumps({**json.loads(index.read_text()), "adapters": [name]}))
    with pytest.raises(ConfigError, match="names an adapter"):
        load(adapters)


def test_a_checkpoint_whose_state_is_damaged_is_a_clear_error(model, tmp_path):
    backend = TorchLearner(model, device="cpu")
    backend.save(tmp_path / "checkpoint")
    state = next(path for path in (tmp_path / "checkpoint").glob("*.json") if "random" in json.loads(path.read_text()))
    whole = json.loads(state.read_text())
    damages = [{"random": "x"}, {"random": [3, ["x"], None]}, {"version": []}, {"versions": 7}]
    for broken in [[], {"format": whole["format"]}, *({**whole, **damage} for damage in damages)]:
        state.write_text(json.dumps(broken))
        with pytest.raises(ConfigError):
            backend.load(tmp_path / "checkpoint")
