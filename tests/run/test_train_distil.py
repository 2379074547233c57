"""On-policy distillation: a tiny student learns a teacher's tokens on its own samples, from a folder or a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_spans.errors import ConfigError
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer import TrainConfig, train
from lightning_trainer.kits.teaching.endpoint import EndpointTeacher, TeacherError
from lightning_trainer.rl.algorithms.distil import FARTHEST, distil_rows
from lightning_trainer.rl.rows import Row
from support.models.tiny import make_tiny_model
from support.models.updates import make_backend
from support.training.programs import folder_with
from support.training.tiny_runs import PROGRAMS, config, lines

folder = folder_with(5, **PROGRAMS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("teacher") / "teacher", seed=7, initializer_range=0.2
    )  # with opinions


def distil(model: Path, teacher: Path | str, **options: Any) -> TrainConfig:
    return config(model, algorithm="distil", teacher=str(teacher), **options)


def likely(model: Path) -> Callable[[list[int]], np.ndarray]:
    """Return what gives, by transformers, the log-probability of each token but the first."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def of(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            found = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
        return found[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()

    return of


def row(ids: list[int], learned: int) -> Row:
    mask = np.arange(len(ids)) >= len(ids) - learned
    zeros = np.zeros(len(ids))
    return Row(
        tokens=np.array(ids, np.int32), mask=mask, logprobs=np.where(mask, -1.0, 0.0).astype("f4"), advantages=zeros,
        lengths=(learned,), agent="writer", attempt_id="a", rollout_id="r", group_id="g",
    )  # fmt: skip


def test_a_token_is_worth_how_much_likelier_the_teacher_finds_it() -> None:
    (found,), divergence = distil_rows([row([5, 6, 7, 8], 3)], [np.array([-0.25, -3.0, -9999.0])])
    assert found.advantages.tolist() == [0.0, 0.75, -2.0, -FARTHEST]
    assert divergence == pytest.approx((-0.75 + 2 + FARTHEST) / 3)
    with pytest.raises(ValueError, match="3 tokens"):
        distil_rows([row([5, 6, 7, 8], 3)], [np.array([-0.25, -3.0])])


def test_the_divergence_told_is_that_of_what_was_sampled(folder: Path, tiny_model: Path, teacher: Path) -> None:
    train(distil(tiny_model, teacher, steps=2, group_size=4, learning_rate=1e-3, batch_size=5))
    told = [line["teacher_kl"] for line in lines(folder / "out")]
    store = open_store(str(folder / "out/lightning.db"))
    calls = [node.call for trace in traces_of(store) for node in trace.chats]
    store.close()
    first = [call for call in calls if call is not None and call.policy_version == 0]
    assert len(first) == 20
    of, gaps = likely(teacher), []
    for call in first:
        (choice,) = call.choices
        its = of([*call.prompt_token_ids, *choice.token_ids])[-len(choice.token_ids) :]
        gaps += (np.array(choice.logprobs) - its).tolist()
    assert told[0] == pytest.approx(sum(gaps) / len(gaps), abs=1e-3)


def test_a_teacher_with_another_vocabulary_is_refused_before_the_first_rollout(
    folder: Path, tiny_model: Path, teacher: Path
) -> None:
    from transformers import AutoTokenizer

    other = make_tiny_model(folder / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(
        text.replace('"a":', '"??":').replace('"b":', '"a":').replace('"??":', '"b":')
    )
    assert AutoTokenizer.from_pretrained(other).get_vocab() != AutoTokenizer.from_pretrained(teacher).get_vocab()
    with pytest.raises(ConfigError, match=r"another vocabulary: 2 of the student's 259 tokens .*'a'"):
        train(distil(tiny_model, other))
    assert not (folder / "out").exists()
    with serving(teacher, shift=1) as url, pytest.raises(ConfigError, match="another vocabulary"):
        train(distil(tiny_model, f"big={url}"))
    assert not (folder / "out").exists()


def test_a_team_without_an_adapter_for_the_student_is_refused_before_the_first_rollout(
    folder: Path, tiny_model: Path
) -> None:
    team = make_backend(tiny_model, adapters=("writer", "checker"), lora_rank=2)
    team.save(folder / "team", resumable=False)
    team.close()
    with pytest.raises(ConfigError, match=r"has the adapters writer, checker, .* folder of one .*team/writer"):
        train(distil(tiny_model, folder / "team"))
    assert not (folder / "out").exists()
    train(distil(tiny_model, folder / "team/writer", steps=1))
    policies = {"policies": "writer=lora", "agents": None, "lora_rank": 2}
    train(distil(tiny_model, folder / "team", steps=1, out="named", **policies))


def test_a_teacher_needs_its_algorithm_and_the_algorithm_a_teacher(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="distil needs a teacher"):
        config(tiny_model, algorithm="distil")
    with pytest.raises(ConfigError, match="teacher needs algorithm = distil"):
        config(tiny_model, teacher="x")
    with pytest.raises(ConfigError, match="Set temperature to 1"):
        distil(tiny_model, "big=http://127.0.0.1:9/v1", temperature=0.7)


@contextmanager
def serving(model: Path, *, shift: int = 0, broken: bool = False) -> Iterator[str]:
    """Serve what vLLM says of prompts; `shift` writes text with other tokens."""
    from transformers import AutoTokenizer

    tokenizer, of = AutoTokenizer.from_pretrained(model), likely(model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert body["model"] == "big"
            if self.path == "/tokenize":
                ids = tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
                answer: Any = {"count": len(ids), "tokens": [each + shift for each in ids]}
            else:
                assert (self.path, body["max_tokens"], body["prompt_logprobs"]) == ("/v1/completions", 1, 0)
                each = [
                    {str(i): {"logprob": float(p)}} for i, p in zip(body["prompt"][1:], of(body["prompt"]), strict=True)
                ]
                answer = {"choices": [{"text": "x", "prompt_logprobs": None if broken else [None, *each]}]}
            told = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(told)))
            with suppress(ConnectionError):  # the run was stopped and its client is gone
                self.end_headers()
                self.wfile.write(told)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_a_teacher_behind_a_server_says_what_the_folder_says(folder: Path, tiny_model: Path, teacher: Path) -> None:
    rows = [row([5, 9, 30, 31, 2], 3), row([40, 41, 42], 2)]
    of = likely(teacher)
    with serving(teacher) as url:
        server = EndpointTeacher(f"big={url}")
        found = server.logprobs(rows)
        server.close()
        train(distil(tiny_model, f"big={url}", steps=1))
    for own, asked in zip(found, rows, strict=True):
        assert own == pytest.approx(of(asked.tokens.tolist())[asked.mask[1:]], abs=1e-5)
    train(distil(tiny_model, teacher, steps=1, out="again"))
    told = [lines(folder / out)[0]["teacher_kl"] for out in ("out", "again")]
    assert told[0] == pytest.approx(told[1], abs=1e-3)
    with serving(teacher, broken=True) as url:
        server = EndpointTeacher(f"big={url}")
        with pytest.raises(TeacherError, match="knows prompt_logprobs"):
            server.logprobs(rows)
        server.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"tokens": None}, "does not show its tokenizer"),
        ({"tokens": [1, 2], "max_model_len": 512}, "another vocabulary"),
        ({"max_model_len": 16}, "Set --max-model-len 15"),
        ({"max_model_len": 512}, "Set --max-model-len 511, or start the teacher with --max-model-len 513"),
    ],
)
def test_a_server_that_can_be_no_teacher_is_refused_before_the_first_rollout(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], says: str
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def told(_: EndpointTeacher, url: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False), **answer}

    monkeypatch.setattr(EndpointTeacher, "_post", told)
    with closing(EndpointTeacher("big=http://127.0.0.1:9/v1")) as server, pytest.raises(ConfigError, match=says):
        server.check(tokenizer, 512)


def test_a_server_that_reads_the_longest_row_and_writes_one_token_is_a_teacher(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def told(_: EndpointTeacher, url: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False), "max_model_len": 513}

    monkeypatch.setattr(EndpointTeacher, "_post", told)
    with closing(EndpointTeacher("big=http://127.0.0.1:9/v1")) as server:
        server.check(tokenizer, 512)


def test_a_log_probability_above_0_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    each = [None, *({str(number): {"logprob": 3.0}} for number in (41, 42))]
    monkeypatch.setattr(EndpointTeacher, "_post", lambda *_: {"choices": [{"prompt_logprobs": each}]})
    with closing(EndpointTeacher("big=http://127.0.0.1:9/v1")) as server, pytest.raises(TeacherError, match="above 0"):
        server.logprobs([row([40, 41, 42], 2)])
