"""aider, of PyPI: chat completions without tools; an answer is files, and another call writes the commit's message."""

PROGRAM = "aider"
COMMAND = "aider --model openai/{LIGHTNING_MODEL} --yes-always --no-check-update --message {prompt} calc.py"
COMMIT = "commit=system:Git commit message"


def mending(prompt):
    if "Git commit message" in prompt:
        return "fix: add adds"
    return "calc.py\n```\ndef add(a, b):\n    return a + b\n```\n"


async def test_it_mends_a_file_and_is_recorded(commands):
    commands.rules(COMMIT)
    assert await commands.run(COMMAND, mending) == 1.0
    assert "+    return a + b" in commands.diff
    assert (len(commands.answered()), len(commands.answered("commit"))) == (1, 1)


async def test_its_editor_is_told_from_its_architect_by_the_model(commands):
    commands.rules(COMMIT, "architect=model:^gpt-4o$", "editor=model:^gpt-4.1$")
    words = COMMAND.replace("openai/{LIGHTNING_MODEL}", "openai/gpt-4o --architect --editor-model openai/gpt-4.1")
    words = words.replace("--architect", "--architect --editor-edit-format editor-whole")
    assert await commands.run(words, mending) == 1.0
    assert (len(commands.answered("architect")), len(commands.answered("editor"))) == (1, 1)
