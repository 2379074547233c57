from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch import backend as torch_backend
from lightning_trainer.config.files import merge, to_json
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.work import Work

NEEDED: dict[str, Any] = {"target": "my_app:run", "data": "train.jsonl", "model": "./model"}


def config(**options: Any) -> TrainConfig:
    return TrainConfig(**{**NEEDED, **options})


def test_unknown_key_is_an_error_that_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'goup_size'\. Did you mean 'group_size'"):
        config(goup_size=4)


def test_unknown_key_without_a_near_one_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="Known options: advantage_eps, agent_weight, agents"):
        config(zzzzzz=4)


def test_missing_options_say_how_to_give_them() -> None:
    with pytest.raises(ConfigError, match="--model"):
        TrainConfig(target="my_app:run", data=Path("train.jsonl"))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": "many"}, "group_size = 'many'"),
        ({"group_size": 1}, "group_size = 1"),
        ({"learning_rate": 0}, "learning_rate = 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"failed": "zero"}, "failed = 'zero'"),
        ({"failed": float("inf")}, "failed"),
        ({"loss_aggregation": "mean"}, "loss_aggregation = 'mean'"),
        ({"port": 70_000}, "port"),
        ({"command": "node agent.js"}, "target and command"),
        ({"target": None}, "Name the agent"),
        ({"steps": 1, "epochs": 1}, "steps and epochs"),
        ({"agents": ()}, "agents is empty"),
        ({"agents": " , "}, "agents is empty"),
        ({"lora_alpha": 32}, "lora_rank"),
        ({"gamma": 0.9}, "credit"),
        ({"val_every": 2}, "val_every needs val"),
        ({"rollback_on_cliff": True}, "rollback_on_cliff compares validations. Set val_every"),
        ({"task_order": "curriculum", "until": 0.9}, "until compares the training reward"),
        ({"task_order": "curriculum", "staleness": 1}, "chooses tasks before earlier ones are known"),
        ({"agent_weight": "even"}, "agent_weight = 'even': 'even' is not AGENT=NUMBER"),
        ({"agents": "writer", "agent_weight": "writer=0"}, "agent_weight: writer = 0 must be above 0"),
        ({"agents": "writer", "agent_weight": {"rewriter": 2}}, "agent_weight names rewriter, and agents does not"),
        ({"agents": "extract", "agent_weight": "billing/extract=2"}, "agent_weight names billing/extract, and agents"),
        ({"agents": "writer", "agent_weight": "equal"}, "writer is the only one"),
        ({"algorithm": "rloo", "normalise_std": True}, "normalise_std has no effect with algorithm = rloo"),
        ({"algorithm": "grpo", "gae_lambda": 0.9}, "options of algorithm = ppo"),
        ({"algorithm": "ppo", "resample": 2}, "resample looks for rewards that differ"),
        ({"algorithm": "ppo", "credit": "gigpo"}, "algorithm = ppo does not compare within groups"),
        ({"algorithm": "reinforce++", "credit": "gigpo"}, r"algorithm = reinforce\+\+ does not compare within groups"),
        ({"kl_estimator": "k4"}, "kl_estimator = 'k4'"),
    ],
)
def test_wrong_values_and_contradictions_are_errors_that_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_agent_weight_names_agents_that_agents_selects() -> None:
    agents, weight = "billing/extract,solver*", "app/billing/extract=4,solver-a=2,solver*=3"
    assert len(config(agents=agents, agent_weight=weight).agent_weight) == 3


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().steps = 3  # type: ignore[misc]


def test_learning_rate_depends_on_lora_unless_given() -> None:
    assert config().learning_rate == 1e-5
    assert config(lora_rank=16).learning_rate == 1e-4
    assert config(lora_rank=16, learning_rate=3e-5).learning_rate == 3e-5


def test_adapters_of_a_checkpoint_get_the_learning_rate_of_adapters(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": "elsewhere"}))
    header = b"{}"
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    begun = config(model=str(tmp_path))
    assert (begun.learning_rate, begun.lora_rank) == (1e-4, 0), "the identity of a run has the rank that was given"
    assert config(model=str(tmp_path), learning_rate=3e-5).learning_rate == 3e-5
    assert SftConfig(data=("d.jsonl",), model=str(tmp_path)).learning_rate == 2e-4
    assert SftConfig(data=("d.jsonl",), model=str(tmp_path), loss="dpo").learning_rate == 2e-5
    (tmp_path / "adapter_config.json").rename(tmp_path / "config.json")
    assert config(model=str(tmp_path)).learning_rate == 1e-5


@pytest.mark.parametrize("rank", [0, "0", "00"])
def test_rank_0_trains_all_weights_in_a_file_and_as_a_flag(rank: int | str) -> None:
    assert (config(lora_rank=rank).lora_rank, config(lora_rank=rank).learning_rate) == (0, 1e-5)
    assert config(lora_rank=rank, policies="writer=lora").lora_rank == 16
    assert config(lora_rank=rank, backend="tinker", tinker_url="http://127.0.0.1:9").lora_rank == 0, "it refuses that"
    assert config(staleness=rank).old_logprobs == config().old_logprobs


def test_an_algorithm_sets_what_its_paper_has_unless_it_is_given() -> None:
    assert (config(algorithm="dr-grpo").normalise_std, config(algorithm="dr-grpo").loss_aggregation) == (
        False,
        "sequence-sum",
    )
    assert config(algorithm="gspo", clip_high=0.1).clip_high == 0.1
    assert config(algorithm="dapo").resample == 3
    assert config(algorithm="ppo", group_size=1).group_size == 1
    assert config().clip_high == 0.28


def test_agents_may_be_one_text_with_commas() -> None:
    assert config(agents="writer, rewriter").agents == ("writer", "rewriter")
    assert config(agents=["writer"]).agents == ("writer",)


def test_columns_may_be_one_text_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('columns = "question, answer"\n')
    assert merge(file, NEEDED).columns == ("question", "answer")
    assert merge(None, {**NEEDED, "columns": "question,answer"}).columns == ("question", "answer")
    assert config(columns=["question"]).columns == ("question",)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('target = "my_app:run"\ndata = "a.jsonl"\nmodel = "m"\nsteps = 3\ngroup_size = 4\n')
    merged = merge(file, {"group_size": 6, "data": None, "epochs": 2.0})
    assert (merged.group_size, merged.data, merged.steps, merged.epochs) == (6, Path("a.jsonl"), None, 2.0)


def test_a_flag_replaces_one_entry_of_a_table_in_the_file_or_of_an_earlier_run(tmp_path: Path) -> None:
    flags = {**NEEDED, "rewards": {"cost": 0.3}, "backend_options": {"slots": 8}}
    rewards = {"tool_status": 0.5, "latency": 0.1}
    options = {"slots": 64, "micro_batch_tokens": 4096}
    file = tmp_path / "train.toml"
    tables = ("[rewards]", "tool_status = 0.5", "latency = 0.1", "[backend_options]", "slots = 64")
    file.write_text("\n".join([*tables, "micro_batch_tokens = 4096"]))
    base = json.loads(to_json(config(rewards=rewards, backend_options=options)))
    base = {name: value for name, value in base.items() if value is not None}
    for merged in (merge(file, flags), merge(None, flags, base=base), merge(file, flags, base=base)):
        assert merged.rewards == {**rewards, "cost": 0.3}
        assert merged.backend_options == {"slots": 8, "micro_batch_tokens": 4096}
    file.write_text("[rewards]\ncost = 0.3\n")  # a whole table
    assert merge(file, NEEDED, base=base).rewards == {"cost": 0.3}


def test_options_of_a_choice_are_not_kept_for_another_choice() -> None:
    base = {**NEEDED, "credit": "gigpo", "credit_options": {"omega": 0.5}}
    now = {"credit": "counterfactual", "credit_options": {"group": False}}
    assert merge(None, now, base=base).credit_options == {"group": False}
    same = {"credit": "gigpo", "credit_options": {"anchor": "prompt"}}
    assert merge(None, same, base=base).credit_options == {"omega": 0.5, "anchor": "prompt"}


def test_another_reward_or_agent_takes_the_place_of_what_an_earlier_run_had() -> None:
    began = {"target": None, "command": "true", "workdir": "w", "restore": ["t/**"], "reward_command": "make test"}
    base = {name: value for name, value in json.loads(to_json(config(**began))).items() if value is not None}
    scored = merge(None, {"reward": "my_app:score"}, base=base)
    assert (scored.reward, scored.work) == ("my_app:score", Work(workdir="w"))
    python = merge(None, {"target": "my_app:run"}, base=base)
    assert (python.target, python.command, python.work) == ("my_app:run", None, Work())
    base = {name: value for name, value in json.loads(to_json(scored)).items() if value is not None}
    assert merge(None, {"reward_command": "make test"}, base=base).reward is None


@pytest.mark.parametrize(
    ("began", "now"),
    [
        ({}, {"algorithm": "dr-grpo"}),
        ({"algorithm": "dr-grpo"}, {"algorithm": "grpo"}),
        ({"algorithm": "dapo"}, {"algorithm": "gspo", "clip_low": 0.1}),
        ({}, {"credit": "counterfactual"}),
        ({"credit": "counterfactual", "group_size": 8}, {"credit": "identical"}),
    ],
)
def test_a_run_that_goes_on_with_another_algorithm_has_its_defaults(began: dict[str, Any], now: dict[str, Any]) -> None:
    base = json.loads(to_json(config(**began)))
    again = merge(None, now, base={name: value for name, value in base.items() if value is not None})
    assert again == config(group_size=8, **now)


def test_what_was_given_to_a_run_stays_when_it_goes_on_with_another_algorithm() -> None:
    base = json.loads(to_json(config(clip_high=0.25, group_size=4)))
    again = merge(None, {"algorithm": "dr-grpo"}, base={name: v for name, v in base.items() if v is not None})
    assert (again.clip_high, again.loss_aggregation, again.group_size) == (0.25, "sequence-sum", 4)


def test_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('targte = "my_app:run"\n')
    with pytest.raises(ConfigError, match=r"train\.toml: unknown option 'targte'. Did you mean 'target'"):
        merge(file, NEEDED)


@pytest.mark.parametrize("heading", ["train", "lightning", "tool.lightning"])
def test_options_in_a_table_are_told_to_stand_at_the_top(tmp_path: Path, heading: str) -> None:
    (tmp_path / "train.toml").write_text(f"[{heading}]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"train\.toml: options are at the top .* Remove \[\w+\]"):
        merge(tmp_path / "train.toml", NEEDED)


def test_value_that_is_wrong_is_told_with_the_file_that_has_it(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text("learning_rate = -1\n")
    with pytest.raises(ConfigError, match=r"train\.toml: learning_rate = -1"):
        merge(file, NEEDED)
    with pytest.raises(ConfigError, match=r"^learning_rate = -2"):
        merge(file, {**NEEDED, "learning_rate": -2})


def test_file_that_is_missing_or_no_toml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        merge(tmp_path / "none.toml", NEEDED)
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        merge(tmp_path / "bad.toml", NEEDED)


def test_steps_follow_from_epochs() -> None:
    assert config(steps=5).step_count(1000) == 5
    assert config(batch_size=8).step_count(20) == 3
    assert config(batch_size=8, epochs=2).step_count(20) == 5
    assert config(batch_size=8, epochs=0.1).step_count(20) == 1
    assert config(batch_size=10, epochs=1.1).step_count(100) == 11  # 1.1 * 100 / 10 is above 11 in floating point


def test_no_more_workers_than_a_batch_fills() -> None:
    assert config(batch_size=1, group_size=2, concurrency=16).worker_count() == 1
    assert config(workers=5).worker_count() == 5


def test_no_workers_here_where_others_run_the_agent() -> None:
    assert config(backend="verl", workers=0).worker_count() == 0
    with pytest.raises(ConfigError, match="leaves the rollouts to runners elsewhere"):
        torch_backend.check(config(workers=0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend_options": {"slot": 3}}, r"unknown option of the torch backend: slot \(did you mean 'slots'\?\)"),
        ({"backend_options": {"slots": 0}}, "slots must be at least 1"),
        ({"backend_options": {"learning_rate": 1.0}}, "learning_rate is a separate option"),
    ],
)
def test_what_the_torch_backend_can_not_do_is_refused_before_anything_is_opened(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        torch_backend.check(config(**options))


def test_json_form_makes_the_same_configuration_again() -> None:
    original = config(agents="writer", failed=-1.0, val="dev.jsonl", val_every=3)
    assert TrainConfig.model_validate_json(to_json(original)) == original


def test_every_option_is_described() -> None:
    missing = [name for name, field in TrainConfig.model_fields.items() if not field.description]
    assert missing == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("postgresql://me:pa:s%40s@db/x", "postgresql://me@db/x"),
        ("postgresql://db/x?user=me&password=secret&sslmode=require", "postgresql://db/x?user=me&sslmode=require"),
        ("postgresql://db/x?password=secret", "postgresql://db/x"),
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
    ],
)
def test_a_password_in_the_address_of_a_store_is_not_kept(given: str, kept: str) -> None:
    original = config(store=given)
    assert TrainConfig.model_validate_json(to_json(original)).store == kept
    assert original.store == given


def test_an_option_with_a_password_is_marked_and_must_be_given_again() -> None:
    given = {
        "command": "node agent.js --db postgres://me:secret@db/shop",
        "workdir": "https://bot:secret@git.example/app.git",
        "reward_command": "./check.sh 'http://ci/api?password=secret&x=1'",
        "judge": {"endpoint": "https://me:secret@judge.example/v1", "model": "j"},
        "reward": "judge",
    }
    command = {name: given[name] for name in ("command", "workdir", "reward_command")}
    kept = to_json(config(target=None, **command))
    assert "secret" not in kept
    base = {name: value for name, value in json.loads(kept).items() if value is not None}
    assert base["command"] == "node agent.js --db postgres://me:***@db/shop"
    assert base["reward_command"] == "./check.sh 'http://ci/api?password=***&x=1'"
    with pytest.raises(ConfigError, match="Give --command and --workdir and --reward-command again"):
        merge(None, {"steps": 3}, base=base)
    assert merge(None, command, base=base) == config(target=None, **command)
    judged = {"judge": given["judge"], "reward": "judge"}
    base = {name: value for name, value in json.loads(to_json(config(**judged))).items() if value is not None}
    with pytest.raises(ConfigError, match=r"judge had one\. Give --judge again"):
        merge(None, {"judge": {"model": "j2"}}, base=base)
    again = merge(None, {"judge": {"endpoint": "https://me:secret@judge.example/v1"}}, base=base)
    assert again.judge == given["judge"]
