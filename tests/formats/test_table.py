"""The docs' table of families is what the template doctor finds; it is written anew with LIGHTNING_WRITE_DOCS=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_trainer.gateway.prompt.doctor import examine_template
from lightning_trainer.gateway.prompt.template import ChatFormat
from support.models.family_models import ONE_OF_EACH, SERVED_BY_VLLM
from support.models.model_families import Family, all_families, tokenizer_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tool-formats.md"
BEGIN, END = "<!-- table: tests/formats/test_table.py -->\n", "<!-- end of table -->\n"


def rows() -> list[str]:
    names = "family | tools | format | reasoning | plain | reasoning, then a question | tool call | forced | trained as"
    lines = [f"| {names} | vLLM |", f"|{'---|' * 10}"]
    for family in all_families():
        report = examine_template(tokenizer_of(family))
        opened = "no" if report.reasoning is None else f"`{report.reasoning['open'].strip()}`".replace("|", "\\|")
        how = [report.continuation.get(kind, "-").partition(":")[0] for kind in ("plain", "reasoning", "tool call")]
        tools = report.tools.partition(":")[0]
        tried = forced(family), trained(family), served(family)
        cells = (family.name, tools, report.tool_format or "-", opened, *how, *tried)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def forced(family: Family) -> str:
    """How many calls an answer may be forced to have, as `test_forced_calls.py` does it."""
    chat = ChatFormat(tokenizer_of(family))
    if not chat.takes_tools or chat.frame is None:
        return "-"
    number = "one" if chat.frame.between is None else "several"
    opened = chat.opened(chat.render([{"role": "user", "content": "hi"}], []))
    return f"{number}, reasoning off" if opened else number


def trained(family: Family) -> str:
    """The architecture of the tiny model that `test_families.py` trains."""
    return family.architecture if family.name in ONE_OF_EACH else "-"


def served(family: Family) -> str:
    """What a tiny model of the architecture was served with, by `test_vllm_families.py`."""
    return "exact" if family.name in SERVED_BY_VLLM else "-"


def test_the_table_of_families_is_as_measured():
    pytest.importorskip("transformers")
    if len(all_families()) < 20:
        pytest.skip("trl's templates are not here")
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    found = "\n".join(rows()) + "\n"
    if os.environ.get("LIGHTNING_WRITE_DOCS"):
        PAGE.write_text(f"{head}{BEGIN}{found}{END}{rest.partition(END)[2]}", "utf-8")
        return
    assert rest.partition(END)[0] == found
