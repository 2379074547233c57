"""docs/reference/store.md tells the schema as it is."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy.dialects import postgresql

from lightning_spans.store.sql.schema import VERSION, metadata

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "store.md").read_text()


def test_every_column_is_documented_with_its_type() -> None:
    told = {}
    for section in re.split(r"^### ", DOC, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (yes|no) \| [^|]+ \|$", section, flags=re.MULTILINE)
        told[section.split("`")[1]] = rows
    assert told == {
        table.name: [
            (column.name, column.type.compile(postgresql.dialect()), "yes" if column.nullable else "no")
            for column in table.columns
        ]
        for table in metadata.sorted_tables
    }


def test_every_index_and_the_version_are_documented() -> None:
    indexes = {str(index.name) for table in metadata.sorted_tables for index in table.indexes}
    assert indexes == {
        name for line in re.findall(r"^Indexes: (.*)$", DOC, re.M) for name in re.findall(r"`(\w+)`", line)
    }
    assert f"Version {VERSION}." in DOC
