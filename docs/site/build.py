"""Build the docs site, strictly: `nox -s docs`. `-- --serve` shows it at http://127.0.0.1:8000.

Pages are staged (`stage.py`), the generated parts of the reference are filled in (`reference.py`), and what zensical
made of them is read once more (`check.py`). It is an error if a link or an anchor leads nowhere, a page is not listed,
something public has no description, or a page would load anything from elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import check
import finish
import llms
import reference
import signatures
import stage
import yaml

HERE = Path(__file__).parent
SITE = stage.ROOT / "site"


def settings(folder: Path) -> dict[str, object]:
    """Write zensical's configuration for a folder of pages, and return it as read."""
    text = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    paths = "[" + ", ".join(str(path) for path in reference.PACKAGES.values()) + "]"
    text = text.replace("paths: PATHS", f"paths: {paths}")
    (folder / "mkdocs.yml").write_text(f"{text}site_dir: built\n", encoding="utf-8")
    read: dict[str, object] = yaml.safe_load(text)
    return read


def generate(pages: Path) -> list[str]:
    """Fill in what the code says, and return what is public and on no page."""
    listed: set[str] = set()
    for page in sorted(pages.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for mark in reference.MARK.finditer(text):
            listed |= set((mark[2] or "").split()) if mark[1] == "api" else set()
        filled = reference.fill(text)
        if filled != text:
            page.write_text(filled, encoding="utf-8")
    return [
        f"{module} has an __all__ and is on no page of the API reference"
        for module in sorted(reference.public_modules() - listed - reference.NOT_LISTED)
    ]


def build(site: Path = SITE) -> list[str]:
    """Build the site into a folder, and return what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="docs-") as name:
        folder = Path(name)
        problems = [
            f"{page} has signatures that are not those of the code: nox -s table" for page in signatures.stale()
        ]
        problems += stage.stage(folder / "pages")
        nav = check.listed(settings(folder)["nav"])
        problems += check.unlisted(folder / "pages", nav)
        try:
            problems += generate(folder / "pages")
        except reference.UndocumentedError as error:
            return [*problems, str(error)]
        command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(folder / "mkdocs.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr).replace(f"{folder}/", "")
        if done.returncode or "warning" in said.lower():
            problems.append(f"zensical (status {done.returncode}):\n{said[-6000:]}")
        if (folder / "built").is_dir():
            llms.write(folder / "pages", nav, folder / "built")
            finish.finish_pages(folder / "built")
            problems += check.site(folder / "built")
            shutil.rmtree(site, ignore_errors=True)
            shutil.move(folder / "built", site)
    return problems


def serve(site: Path) -> None:
    """Show the built site until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
        print("http://127.0.0.1:8000", flush=True)
        server.serve_forever()


def main() -> None:
    """Build, say what is wrong, and show the site where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="show the site when it is built")
    parser.add_argument("--out", type=Path, default=SITE, help="folder of the site")
    args = parser.parse_args()
    began = time.monotonic()
    problems = build(args.out)
    pages = len(list(args.out.rglob("*.html")))
    print(*problems, f"{pages} pages in {time.monotonic() - began:.0f} s: {args.out / 'index.html'}", sep="\n")
    if problems:
        sys.exit(f"{len(problems)} problems")
    if args.serve:
        serve(args.out)
    else:
        print("The site's search needs a server: nox -s docs -- --serve")


if __name__ == "__main__":
    main()
