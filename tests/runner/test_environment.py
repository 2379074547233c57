"""What an agent gets of its runner's environment, and what it is told of the rest."""

from __future__ import annotations

from lightning_trainer.runner.environment import allowed_environment, explain_missing_variables


def test_a_variable_that_an_agent_misses_is_named_with_the_option_that_passes_it() -> None:
    shell = {"PATH": "/bin", "MYAPP_DB": "x", "TAVILY_API_KEY": "y", "LIGHTNING_KEY": "hush"}
    told = explain_missing_variables("KeyError: 'MYAPP_DB'", shell, allowed_environment(shell))
    assert told.splitlines()[0] == (
        "MYAPP_DB is set in the runner's shell and not passed to agents: add --pass-env MYAPP_DB"
    )
    assert told.splitlines()[-1] == "KeyError: 'MYAPP_DB'"
    assert (
        explain_missing_variables("KeyError: 'MYAPP_DB'", shell, allowed_environment(shell, ["MYAPP_*"]))
        == "KeyError: 'MYAPP_DB'"
    )
    assert (
        explain_missing_variables("PATH and LIGHTNING_KEY", shell, allowed_environment(shell))
        == "PATH and LIGHTNING_KEY"
    )
