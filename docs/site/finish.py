"""What is changed in the built pages: the copy button takes commands alone, and no key turns a page."""

from __future__ import annotations

import html
import re
from pathlib import Path

BLOCK = re.compile(r'<div class="highlight">(?=<pre><span></span><code>(.*?)</code></pre>)', re.DOTALL)
TURN = re.compile(r'<link rel="(?:prev|next)"[^>]*>\s*')  # where the theme's keys p and n lead, search box or not


def finish_pages(site: Path) -> None:
    """Change every page of a built site."""
    for path in sorted(site.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        path.write_text(BLOCK.sub(_with_commands, TURN.sub("", text)), encoding="utf-8")


def commands(text: str) -> str:
    """Return the commands of a terminal session without prompts and output. A backslash continues a command."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            lines.append(line[2:])
        elif lines and lines[-1].endswith("\\"):
            lines.append(line)
    return "\n".join(lines)


def _with_commands(block: re.Match[str]) -> str:
    session = 'class="gp"' in block[1]  # a prompt
    copied = commands(html.unescape(re.sub(r"<[^>]+>", "", block[1]))) if session else ""
    return f'<div class="highlight" data-copy="{html.escape(copied)}">' if copied else block[0]
