"""Which policy answers which agent, as written on the command line and in a file."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import to_json
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.policies import Policies, parse


def config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"target": "my_app:run", "data": "train.jsonl", "model": "./model", **options})


def test_each_agent_named_gets_an_adapter_of_its_own_and_is_trained() -> None:
    found = config(policies="writer=lora,rewriter=lora")
    assert found.agents == ("writer", "rewriter")
    assert parse(found.policies).by_agent == {"writer": "writer", "rewriter": "rewriter"}
    assert (found.lora_rank, found.learning_rate) == (16, 1e-4)


def test_agents_that_name_one_adapter_share_it() -> None:
    policies = parse({"writer": "lora:team", "rewriter": "lora:team", "checker": "lora"})
    assert policies.adapters == ("team", "checker")
    assert policies.of("rewriter") == "team"


def test_base_is_served_and_never_trained() -> None:
    found = config(policies="writer=lora,checker=base")
    assert found.agents == ("writer",)
    assert parse(found.policies).of("checker") == "base"
    assert parse(found.policies).adapters == ("writer",)


def test_fixed_adapter_is_served_and_never_trained() -> None:
    found = config(policies="writer=lora,rewriter=fixed,editor=fixed:team")
    policies = parse(found.policies)
    assert found.agents == ("writer",)
    assert (policies.adapters, policies.fixed) == (("writer", "rewriter", "team"), {"rewriter", "team"})


def test_trained_agents_without_a_policy_share_one() -> None:
    found = config(agents="writer,rewriter,checker", policies="writer=lora")
    assert parse(found.policies).by_agent == {"writer": "writer", "rewriter": "shared", "checker": "shared"}


def test_exact_names_go_before_globs_and_a_prefix_is_another_name() -> None:
    policies = parse({"*": "lora:others", "writer": "lora"})
    assert (policies.of("writer"), policies.of("rewriter"), policies.of(None)) == ("writer", "others", None)
    assert Policies({"*": "others", "writer": "writer"}).of("writer") == "writer"
    assert Policies({"writer": "writer"}).of("rewriter") is None


def test_agent_names_that_no_folder_could_have_make_adapter_names_that_one_can() -> None:
    assert parse({"Senior Researcher": "lora"}).adapters == ("Senior_Researcher",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": "writer"}, "write AGENT=lora"),
        ({"policies": "writer=full"}, "write writer=lora, writer=lora:NAME to share, writer=fixed or writer=base"),
        ({"policies": "writer=lora:"}, "write writer=lora"),
        ({"policies": "*=lora"}, r"it needs a name: \*=lora:NAME"),
        ({"policies": "a b=lora,a_b=lora"}, "would both be named a_b"),
        ({"policies": "writer=lora:base"}, "can't be named 'base'"),
        ({"policies": "writer=lora:a/b"}, "can't be named 'a/b'"),
        ({"policies": "\N{SNOWMAN}=lora"}, "can't be named ''"),
        ({"policies": "writer=lora,writer=base"}, "writer has two"),
        ({"policies": "checker=base"}, "no policy is trained"),
        ({"policies": "writer=lora", "agents": "rewriter"}, "writer is not in agents"),
        ({"policies": "writer=base", "agents": "writer"}, "its policy base is not trained"),
        ({"policies": "writer=lora:a,rewriter=fixed:a"}, "can't be both trained and fixed"),
        ({"policies": "writer=fixed"}, "no policy is trained"),
        ({"policies": {"writer": 3}}, "policies = 3"),
    ],
)
def test_what_can_not_be_done_is_refused_and_says_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


@pytest.mark.parametrize("text", ["writer=lora", "writer=lora:team,*=lora:team,judge=base", "a=lora, b=lora,"])
def test_configuration_with_policies_comes_back_the_same_from_the_run_folder(text: str) -> None:
    found = config(policies=text)
    assert TrainConfig.model_validate_json(to_json(found)) == found
