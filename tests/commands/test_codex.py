"""codex, of npm: Responses with namespaces, tools of free text, a web search, and sub-agents."""

import pytest

from support.commands import call, results

PROGRAM = "codex"
COMMAND = "codex exec --dangerously-bypass-approvals-and-sandbox -c openai_base_url={OPENAI_BASE_URL} {more} {prompt}"
POLICY = COMMAND.replace("{more}", "-m policy")
SED = "sed -i 's/a - b/a + b/' calc.py"


def functions(prompt):
    return "Mended." if results(prompt) else call("exec_command", cmd=SED)


def code(prompt):
    return "Mended." if results(prompt) else call("exec", input=f'text(await tools.exec_command({{cmd: "{SED}"}}));')


@pytest.mark.parametrize(
    ("command", "script", "left_out"),
    [
        (POLICY, functions, {"tools": ["web_search"]}),
        (COMMAND.replace("{more} ", ""), code, {"reasoning_effort": "low", "verbosity": "low"}),  # its own model
    ],
)
async def test_it_mends_a_file_and_is_recorded(commands, command, script, left_out):
    assert await commands.run(command, script) == 1.0
    assert "+    return a + b" in commands.diff
    found = commands.answered()
    assert len(found) == 2
    assert found[0].sampling["left_out"] == left_out


def asking(prompt):
    if "SUBTASK" in prompt and "Ask somebody" not in prompt:
        return "There is one file."
    if results(prompt) == 0:
        return call("multi_agent_v1__spawn_agent", message="SUBTASK")
    if results(prompt) == 1:
        name = prompt.rpartition("agent_id")[2].split('"')[2].rstrip("\\")
        return call("multi_agent_v1__wait_agent", targets=[name], timeout_ms=10_000)
    return "Done."


async def test_its_sub_agents_are_told_by_a_header(commands):
    commands.rules("header:x-openai-subagent")
    assert await commands.run(POLICY, asking, prompt="Ask somebody.") == 0.0
    assert (len(commands.answered()), len(commands.answered("collab_spawn"))) == (3, 1)
