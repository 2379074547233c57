"""What the build of the docs site refuses, without building it: `nox -s docs` does that."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import check
import finish
import fits
import llms
import reference
import signatures
import sizes
import snippets
import stage


def test_dead_links_anchors_and_loads_from_elsewhere_are_found(tmp_path):
    (tmp_path / "search.json").touch()
    (tmp_path / "llms.txt").write_text("text\n::: lightning_spans.attach\n")
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">x</a><a href="b.html#gone">x</a><a href="gone.html">x</a>'
        '<a href="https://x.example">x</a><a href="#top">x</a>'
        '<script src="https://cdn.example/x.js"></script><img src="gone.png"><link rel="canonical" href="https://a.b/">'
    )
    (tmp_path / "b.html").write_text('<h2 id="there">B</h2>')
    assert check.site(tmp_path) == [
        "llms.txt has unfilled lines (:::)",
        "a.html loads https://cdn.example/x.js from elsewhere",
        "a.html: b.html#gone leads nowhere",
        "a.html: gone.html leads nowhere",
        "a.html: gone.png leads nowhere",
    ]


def test_the_copy_button_takes_commands_alone_and_no_key_turns_a_page(tmp_path):
    session = (
        '<div class="highlight"><pre><span></span><code>'
        '<span class="gp">$ </span>rl train<span class="w"> </span>&quot;a b&quot; \\\n'
        '    --steps &lt;N&gt;\n<span class="go">step 1</span>\n<span class="gp">$ </span>rl eval\n</code></pre></div>'
    )
    program = '<div class="highlight"><pre><span></span><code>x = "$ y"\n</code></pre></div>'
    page = tmp_path / "a.html"
    page.write_text(f'<link rel="prev" href="b.html">\n<link rel="next" href="c.html">{session}{program}')
    finish.finish_pages(tmp_path)
    copied = "rl train &quot;a b&quot; \\\n    --steps &lt;N&gt;\nrl eval"
    marked = session.replace(' class="highlight"', f' class="highlight" data-copy="{copied}"')
    assert page.read_text() == marked + program


def test_pages_that_nobody_lists_and_names_without_a_page_are_found(tmp_path):
    for name in ("index.md", "new.md"):
        (tmp_path / name).touch()
    nav = check.listed([{"Home": "index.md"}, {"How-to": ["gone.md", {"More": ["index.md"]}]}])
    assert nav == [("index.md", "Home"), ("gone.md", "How-to"), ("index.md", "How-to")]
    assert check.unlisted(tmp_path, nav) == [
        "new.md is not in the navigation: docs/site/mkdocs.yml",
        "docs/site/mkdocs.yml names gone.md, which is not there",
        "docs/site/mkdocs.yml names index.md twice",
    ]


def test_links_follow_the_pages_to_where_they_lie_on_the_site(tmp_path):
    root = tmp_path / "root"
    for name in ("docs/how-to", "docs/deep", "examples/toy"):
        (root / name).mkdir(parents=True)
    (root / "docs" / "how-to" / "page.md").write_text(
        "[a](../../examples/toy) [b](../deep/other.md#x) [c](../../noxfile.py) [d](gone.md)\n```\n[e](gone.md)\n```\n"
    )
    for name in (
        str(Path("docs", "deep", "other.md")),
        "examples/toy/README.md",
        "noxfile.py",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ):
        (root / name).touch()
    (root / "SECURITY.md").touch()
    problems = stage.stage(tmp_path / "pages", root)
    assert problems == [f"{Path('docs', 'how-to')}/page.md: gone.md is not there"]
    text = (tmp_path / "pages/how-to/page.md").read_text()
    assert text == "[a](../examples/toy.md) [b](../deep/other.md#x) c d\n```\n[e](gone.md)\n```\n"


def test_parts_of_files_are_taken_as_they_are_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "x.py").write_text("# --8<-- [start:a]\n    one\n      two\n# --8<-- [end:a]\n")
    page = "  <!-- snippet: x.py:a x.py:a -->\n  ```python\n  old\n  ```\n"
    filled = "  <!-- snippet: x.py:a x.py:a -->\n  ```python\n  one\n    two\n\n  one\n    two\n  ```\n"
    assert snippets.fill(page, tmp_path) == filled
    for source in ("x.py:b", "y.py"):
        with pytest.raises(ValueError, match=r"does not have|is not a file"):
            snippets.fill(page.replace("x.py:a", source), tmp_path)


def test_every_program_that_a_page_shows_is_the_one_that_is_tested():
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert "--8<--" not in text, page
        assert text.count("<!-- snippet: ") == len(snippets.BLOCK.findall(text)), page
        stale += [page.name] if snippets.fill(text) != text else []
    assert stale == [], "stale: nox -s table"


def test_the_sizes_of_packages_are_those_of_the_code() -> None:
    """Write them anew with `nox -s table`."""
    found = sizes.rows(sizes.PAGE.read_text(encoding="utf-8"))
    assert len(found) > 12
    assert [row for row in found if abs(row[1] - row[2]) > 0.1 * row[2] + 100] == []


def test_the_table_of_what_fits_is_what_a_dry_run_computes() -> None:
    """Write it anew with `nox -s table`."""
    text = fits.PAGE.read_text(encoding="utf-8")
    assert len(fits.TABLE.findall(text)) == 1
    assert fits.fill(text) == text
    assert "| 7B | adapter, `--base-bits 4` |" in text


def test_every_command_and_option_is_in_the_reference():
    from lightning_trainer.cli import COMMANDS

    text = reference.commands()
    assert set(re.findall(r"^## `(\w+)`", text, flags=re.MULTILINE)) == set(COMMANDS)
    assert "`--learning-rate X`" in text
    assert "### `key live`" in text


def test_every_field_of_the_configuration_is_in_the_reference():
    from lightning_trainer import TrainConfig

    text = reference.configuration()
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(TrainConfig.model_fields)
    assert "## How it learns" in text


def test_every_request_that_is_served_is_in_the_reference():
    text = reference.http()
    for request in ("POST /v1/chat/completions", "POST /v1/traces", "GET /healthz", "POST /api/rewards"):
        assert f"`{request}`" in text


def test_an_option_without_help_is_an_error():
    import click

    with pytest.raises(reference.UndocumentedError, match="--silent has no help"):
        list(reference._command(click.Command("x", help="X.", params=[click.Option(["--silent"])]), "x y", 2))


def test_an_unknown_mark_is_an_error():
    with pytest.raises(reference.UndocumentedError, match="nonsense"):
        reference.fill("<!-- generate: nonsense -->")


def test_every_variable_that_is_read_is_on_its_page():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    sources = [path for source in reference.PACKAGES.values() for path in source.rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"\bLIGHTNING_[A-Z_]*[A-Z]\b", path.read_text())}
    assert sorted(name for name in read - {"LIGHTNING_KEY_FD"} if name not in page) == []


def test_a_page_is_summed_up_by_its_first_sentence():
    text = "# A `title`\n\nDo [this](x.md) first: so. Then\nthat.\n"
    assert (llms.title(text), llms.summary(text)) == ("A title", ": Do this first")


def test_the_short_instructions_of_llms_txt_use_only_the_options_of_the_page_for_coding_agents():
    page = (ROOT / "docs" / "AGENTS.md").read_text()  # a test follows that page
    assert set(re.findall(r"--[a-z-]+", llms.ABOUT)) <= set(re.findall(r"--[a-z-]+", page))
    assert set(re.findall(r"lightning-rl ([a-z]+)", llms.ABOUT)) <= set(re.findall(r"lightning-rl ([a-z]+)", page))


def test_signatures_in_the_repository_give_way_to_the_site():
    text = "# A\n\n<!-- generate: attributes x.Y -->\n\nend\n"
    written = f"{reference.WRITTEN}\n\n```python\ndef f() -> None\n```\n\n{reference.END}"
    assert reference.without_signatures(text.replace("\n\nend", f"\n\n{written}\n\nend")) == text
    parts = [f"name_{n}: dict[str, int] = {{}}" for n in range(4)]
    long = signatures._wrap(f"def f({', '.join(parts)}) -> Callable[[int], str]")
    assert long == "\n".join(["def f(", *(f"    {part}," for part in parts), ") -> Callable[[int], str]"])
    assert signatures._wrap("def f(a: int) -> str") == "def f(a: int) -> str"
