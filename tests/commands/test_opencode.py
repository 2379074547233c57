"""opencode, of npm: Responses, a title on the side, and sub-agents."""

from support.commands import call, results

PROGRAM = "opencode"
COMMAND = "opencode run -m openai/gpt-5 {prompt}"
RULES = ("title=system:title generator", "explore=system:file search specialist")


def mending(prompt):
    command = "sed -i 's/a - b/a + b/' calc.py"
    return "Mended." if results(prompt) else call("bash", command=command, description="mend")


async def test_it_mends_a_file_and_is_recorded(commands):
    commands.rules(*RULES)
    assert await commands.run(COMMAND, mending) == 1.0
    assert "+    return a + b" in commands.diff
    assert len(commands.answered("title")) == 1
    found = commands.answered()
    assert len(found) == 2
    assert found[0].sampling["left_out"] == {"reasoning_effort": "medium"}


def asking(prompt):
    if "SUBTASK" in prompt and "Ask somebody" not in prompt:
        return "There is one file."
    return "Done." if results(prompt) else call("task", description="d", prompt="SUBTASK", subagent_type="explore")


async def test_its_sub_agents_are_told_by_their_system_prompt(commands):
    commands.rules(*RULES)
    assert await commands.run(COMMAND, asking, prompt="Ask somebody.") == 0.0
    assert (len(commands.answered()), len(commands.answered("explore"))) == (2, 1)
