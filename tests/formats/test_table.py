"""The docs' table of families is what the template doctor finds; it is written anew with LIGHTNING_WRITE_DOCS=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_families import all_families, tokenizer_of

from lightning_trainer.gateway.prompt.doctor import examined

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tool-formats.md"
BEGIN, END = "<!-- table: tests/formats/test_table.py -->\n", "<!-- end of table -->\n"


def rows() -> list[str]:
    lines = ["| family | tools | format | reasoning | plain | reasoning, then a question | tool call |"]
    lines.append("|---|---|---|---|---|---|---|")
    for family in all_families():
        report = examined(tokenizer_of(family))
        opened = "no" if report.reasoning is None else f"`{report.reasoning['open'].strip()}`".replace("|", "\\|")
        how = [report.continuation.get(kind, "-").partition(":")[0] for kind in ("plain", "reasoning", "tool call")]
        tools = report.tools.partition(":")[0]
        lines.append(f"| {' | '.join((family.name, tools, report.tool_format or '-', opened, *how))} |")
    return lines


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
