"""Claude Code, of npm: Anthropic's messages with thinking, effort, a title on the side, and sub-agents."""

from support.commands import call, results

PROGRAM = "claude"
COMMAND = "claude -p --permission-mode acceptEdits {prompt}"
RULES = ("title=system:sentence-case title", "explore=system:file search specialist")


def mending(prompt):
    # Claude Code adds `replace_all` to calls that lack it when it sends them back, and so begins another row
    steps = [
        "I look. " + call("Bash", command="cat calc.py"),
        call("Read", file_path="calc.py"),
        call("Edit", file_path="calc.py", old_string="a - b", new_string="a + b", replace_all=False),
    ]
    return steps[results(prompt)] if results(prompt) < len(steps) else "Mended."


async def test_it_mends_a_file_and_is_recorded(commands):
    commands.rules(*RULES)
    assert await commands.run(COMMAND, mending) == 1.0
    assert "+    return a + b" in commands.diff
    found = commands.answered()
    assert len(found) == 4
    assert {one.sampling["left_out"]["reasoning_effort"] for one in found} == {"high"}
    # its title is asked for as JSON of a schema, which the scripted engine can't be held to; the command goes on
    assert [one.agent for one in commands.calls if one.error] == ["title"]


def asking(prompt):
    if "SUBTASK" in prompt and "Ask somebody" not in prompt:
        return "There is one file."
    return "Done." if results(prompt) else call("Agent", description="d", prompt="SUBTASK", subagent_type="Explore")


async def test_its_sub_agents_are_told_by_their_system_prompt(commands):
    commands.rules(*RULES)
    assert await commands.run(COMMAND, asking, prompt="Ask somebody.") == 0.0
    assert (len(commands.answered()), len(commands.answered("explore"))) == (2, 1)
