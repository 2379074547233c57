"""Checks for options of a run that contradict each other. Each message says which one to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spans.schema.agents import is_glob, label, selects
from lightning_trainer import registry
from lightning_trainer.choices import SELF, TRACKERS
from lightning_trainer.config.chosen import OF_ONE_BACKEND, backend_options, check_credit, chosen_algorithm
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.naming import parse_rules

if TYPE_CHECKING:
    from lightning_trainer.config.fields import TrainFields
    from lightning_trainer.options.learning import AdapterOptions


def of_adapters(config: AdapterOptions, backend: str) -> dict[str, bool]:
    """Return the problems of adapters, by error message, and whether the options have them."""
    return {
        "lora_alpha needs lora_rank. Give a rank, or leave alpha out.": (
            config.lora_alpha is not None and not config.lora_rank
        ),
        "base_bits must be 4 or 8, or left out.": config.base_bits not in (None, 4, 8),
        "base_bits quantises the frozen model under adapters. Set lora_rank or policies, or leave it out.": (
            config.base_bits is not None and not config.lora_rank
        ),
        f"base_bits is an option of backend = torch, not {backend}. Leave it out.": (
            config.base_bits is not None and backend != "torch"
        ),
    }


def cross_check(config: TrainFields) -> None:
    """Reject options that contradict each other. Each message says which one to change."""
    algorithm = registry.by_name("algorithm", config.algorithm)
    _check_names(config)
    algorithm.check(config)
    parse_rules(config.name_by)
    config.work.check(command=config.command, reward=config.reward)
    foreign = [n for n in OF_ONE_BACKEND if getattr(config, n) is not None and n not in backend_options(config.backend)]
    problems = {
        f"{', '.join(foreign)}: an option of backend = tinker. Set backend = tinker, or leave it out.": bool(foreign),
        "Name the agent: a target module:function, or a command.": config.target is None and config.command is None,
        "target and command both name an agent. Give one of them.": None not in (config.target, config.command),
        "steps and epochs both set the length. Give one of them.": None not in (config.steps, config.epochs),
        "agents is empty. Name the agents to train, or leave it out to train all.": config.agents == (),
        **of_adapters(config, config.backend),
        **_of_agent_weight(config),
        "gamma has no effect with credit = identical. Set credit to discounted, or leave gamma out.": (
            config.gamma is not None and config.credit == "identical"
        ),
        "kl_estimator = k1 has no gradient in the loss: its expected gradient is 0. Use k3 or k2, or set kl_in to"
        " reward.": config.kl_coef > 0 and config.kl_in == "loss" and config.kl_estimator == "k1",
        "min_lr_ratio is the end of a decaying learning rate. Set lr_schedule to cosine or linear, or leave it out.": (
            config.min_lr_ratio > 0 and config.lr_schedule == "constant"
        ),
        "teacher needs algorithm = distil. Set it, leave teacher out, or let the policy teach itself (self).": (
            config.teacher not in (None, SELF) and config.algorithm != "distil"
        ),
        "teacher_options need teacher = self. Set it, or leave them out.": (
            bool(config.teacher_options) and config.teacher != SELF
        ),
        "reflector and prompt_options are options of with_prompts. Set it, or leave them out.": (
            not config.with_prompts and (config.reflector is not None or bool(config.prompt_options))
        ),
        **_of_forks(config),
        "rollback_on_cliff compares validations. Set val_every, and name held-out tasks with val.": (
            config.rollback_on_cliff and None in (config.val, config.val_every)
        ),
        "rollback_on_cliff compares validations, and a judge's scores can't be compared across validations."
        " Use a reward function, or leave it out.": config.rollback_on_cliff and config.uses_judge,
        "until compares the training reward, and task_order = curriculum prefers tasks that are not solved yet. Leave"
        " one of them out.": config.until is not None and config.task_order == "curriculum",
        f"staleness = {config.staleness} chooses tasks before earlier ones are known, on which task_order = curriculum"
        " depends. Leave one of them out.": config.staleness > 0 and config.task_order == "curriculum",
        "val_every needs val. Name a file of held-out tasks.": config.val_every is not None and config.val is None,
    }
    refuse(problems)
    discount = {} if config.gamma is None else {"gamma": config.gamma}
    check_credit(config.credit, {**config.credit_options, **discount})


def _check_names(config: TrainFields) -> None:
    """Refuse unknown names of everything that is chosen by name; the algorithm's is known already."""
    registry.check("credit", config.credit)
    registry.check("backend", config.backend)
    registry.check("tool format", config.tool_format)
    registry.check("engine", config.engine)
    registry.check("judge", config.judge.get("kind"))
    for tracker in config.trackers:
        if tracker not in TRACKERS:
            raise registry.unknown("tracker", tracker, TRACKERS)
    for rule in config.rewards:
        registry.check_rule(rule)


def _of_agent_weight(config: TrainFields) -> dict[str, bool]:
    """Return the problems with agent weights that would have no effect."""
    named = {} if config.agent_weight == "equal" else config.agent_weight
    wrong = [f"{name} = {weight:g}" for name, weight in named.items() if weight <= 0]
    agents = config.agents or ()
    # An agent that is selected by its name alone has no path in the loss, so a path would not match it.
    strangers = [n for n in named if n not in agents and not (selects(agents, n) and label(n, agents) == n)]
    return {
        f"agent_weight: {', '.join(wrong)} must be above 0. To train the other agents only, leave it out of agents.": (
            bool(wrong)
        ),
        f"agent_weight names {', '.join(strangers)}, and agents does not. Add each of these agents to agents.": bool(
            strangers
        ),
        f"agent_weight = equal compares agents, and {(agents or ('',))[0]} is the only one. Leave it out.": (
            config.agent_weight == "equal" and len(agents) == 1 and not is_glob(agents[0])
        ),
    }


def _of_forks(config: TrainFields) -> dict[str, bool]:
    """Return the conflicts of options with forks, and the options that need forks."""
    if config.by_coalitions:
        return _of_coalitions(config)
    if not config.uses_forks:
        given = (config.forks, config.alternatives, config.fork_at, config.fork_tools) != (None, 3, "agents", {})
        return {
            "forks, alternatives, fork_at and fork_tools need credit = counterfactual. Set it, or leave these out.": (
                given
            )
        }
    what = f"credit = {config.credit}"
    able = bool(getattr(chosen_algorithm(config.algorithm), "alternatives", False))
    return {
        f"algorithm = {config.algorithm} can't compare a call with its alternatives alone. With {what} use grpo,"
        " dr-grpo, gspo, cispo or rloo.": not able,
        f"{what} has the program run again up to a call, with the tools' results from the record; a command of another"
        " language would run its tools twice. Give a Python target.": config.command is not None,
        f"a judge compares rollouts with others of their group, and {what} "
        "compares forks of one rollout. Give a reward function, or let the agent return the reward.": config.uses_judge,
        f"resample replaces groups before {what} has sampled anything again. Set resample = 0.": config.resample > 0,
        f"alone = batch has no effect with {what}. Leave it out.": config.alone == "batch",
        f"normalise_std divides by the deviation of a few alternatives with {what}, "
        "which amplifies noise. Leave it out.": config.normalise_std,
        f"forks = {config.forks} is fewer than alternatives = {config.alternatives}: "
        "no call could be sampled that often. Raise forks, or lower alternatives.": config.fork_count
        < config.alternatives,
    }


def _of_coalitions(config: TrainFields) -> dict[str, bool]:
    """Return the conflicts of options with orders, for which the frozen base replaces agents."""
    what, agents = f"orders = {config.orders}", config.agents or ()
    return {
        f"{what} runs coalitions of agents, credit = {config.credit} alternatives of calls, and both would take the"
        " forks of a step. Leave one of them out.": config.uses_forks,
        f"{what} runs whole rollouts again, no alternatives of calls. Leave alternatives and fork_at out.": (
            (config.alternatives, config.fork_at) != (3, "agents")
        ),
        f"{what} has the frozen base answer in an agent's place, and it is served next to adapters only."
        " Give policies, such as --policy writer=lora,checker=lora.": not config.policies,
        f"{what} measures what each agent of a team adds, and {agents[0] if agents else 'nobody'} "
        "is the only trained agent. Leave orders out, or train two or more agents.": len(agents) == 1
        and config.coalitions > 0,
        f"{what} runs the program again with the tools' results from the record; a command of another language would"
        " run its tools twice. Give a Python target.": config.command is not None,
        f"{what} is odd: each order comes next to its reverse. Give an even number.": bool(config.orders % 2),
        f"agents has a glob, so the number of runs of {what} is not known. Limit the runs per step with forks.": (
            config.forks is None and not config.coalitions
        ),
        f"forks = {config.forks} is fewer than the {config.coalitions} runs that one rollout takes. Raise forks.": (
            config.forks is not None and config.forks < config.coalitions
        ),
    }
