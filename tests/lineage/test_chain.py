"""The chain of a manifest: whatever is edited, taken out, put in or forged is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import ConfigError
from lightning_trainer.lineage.chain import ChainWriter, read_head, verify_chain

KEY = b"a key of enough bytes"


def write(path: Path, count: int, key: bytes | None = None) -> list[bytes]:
    writer = ChainWriter(path, key)
    for number in range(count):
        writer.append({"kind": "step", "step": number, "calls": [f"call-{number}"]})
    return path.read_bytes().splitlines(keepends=True)


def forge(lines: list[bytes], **changes: Any) -> bytes:
    """Write a line anew, with a hash that fits it, as somebody without the key can."""
    from lightning_trainer.lineage import chain

    line = {**json.loads(lines[-1]), **changes}
    line["hash"] = chain._hash(line)
    return chain._canonical(line) + b"\n"


@given(place=st.integers(0, 5), kind=st.sampled_from(["edit", "drop", "repeat", "swap"]))
def test_a_line_that_was_edited_taken_out_or_put_in_is_found(
    tmp_path_factory: pytest.TempPathFactory, place: int, kind: str
) -> None:
    path = tmp_path_factory.mktemp("chain") / "lineage.jsonl"
    lines = write(path, 7)
    changed = {
        "edit": [*lines[:place], lines[place].replace(b"call-", b"cell-"), *lines[place + 1 :]],
        "drop": [*lines[:place], *lines[place + 1 :]],
        "repeat": [*lines[:place], lines[place], *lines[place:]],
        "swap": [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]],
    }[kind]
    path.write_bytes(b"".join(changed))
    with pytest.raises(ConfigError, match="it was changed, so the file proves nothing"):
        verify_chain(path)


def test_a_line_that_was_forged_without_the_key_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    lines = write(path, 3, KEY)
    assert verify_chain(path, KEY).signed is True
    assert verify_chain(path).signed is None
    path.write_bytes(b"".join([*lines[:-1], forge(lines, calls=["another"])]))
    verify_chain(path)  # the hashes fit
    with pytest.raises(ConfigError, match="line 3 is signed with another key"):
        verify_chain(path, KEY)


def test_a_writer_goes_on_where_one_was_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    lines = write(path, 3)
    path.write_bytes(b"".join(lines) + lines[0][: len(lines[0]) // 2])
    write(path, 2)
    assert [line["step"] for line in verify_chain(path).lines] == [0, 1, 2, 0, 1]
    assert read_head(path).lines == 5
