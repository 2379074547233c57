"""Rows of Parquet and Arrow files, as `datasets.load_dataset` returns them.

What JSON cannot hold is rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_spans.errors import DataError
from lightning_spans.schema.json import read_json
from lightning_trainer.run.datafiles.rows import DataRow

if TYPE_CHECKING:
    import pyarrow as pa

Decode: TypeAlias = Callable[[Any], Any]
_BATCH: Final = 512
_PLAIN: Final = (
    "is_null", "is_boolean", "is_integer", "is_floating", "is_string", "is_large_string", "is_string_view",
)  # fmt: skip
_LISTS: Final = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
_JSON: Final = "arrow.json"
# Features of `datasets` that are stored in one form and returned in another, such as images and sounds.
_STORED_OTHERWISE: Final = frozenset({"Image", "Audio", "Video", "Pdf", "Nifti", "Mesh", "BioSequence", "BioStructure"})


class _UnreadableTypeError(Exception):
    pass


def arrow_rows(
    path: Path, columns: Collection[str] = (), needed: Collection[str] | None = None, *, sparse: bool = False
) -> Iterator[DataRow]:
    """Read a Parquet file, or an Arrow stream such as `save_to_disk` writes.

    Args:
        path: of the file.
        columns: those to read; empty: all.
        needed: columns whose type JSON must be able to hold; others may have any type, and are left out if necessary.
            None: all that are read.
        sparse: leave out the fields of a record that are null, as in records that lack a field of others.

    Raises:
        DataError: the file cannot be read, or a column contains what JSON cannot hold.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(f"{path} needs pyarrow. Run: pip install pyarrow") from None
    number = 0
    try:
        with path.open("rb") as file:
            schema, batches = _open_batches(path, file)
            decoders = _Columns(path, schema, needed, sparse=sparse).decoders([*columns])
            for batch in batches([*decoders]):
                for line in batch.to_pylist():
                    number += 1
                    yield _row(f"row {number}", line, decoders)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"data file {path} can't be read: {str(error).rstrip('.')}.") from None


def _open_batches(path: Path, file: Any) -> tuple[pa.Schema, Callable[[list[str]], Iterator[Any]]]:
    if path.suffix == ".arrow":
        from pyarrow import ipc

        stream = ipc.open_stream(file)
        return stream.schema, lambda names: (batch.select(names) for batch in stream)
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file)
    return parquet.schema_arrow, lambda names: parquet.iter_batches(_BATCH, columns=names)


def _row(where: str, line: dict[str, Any], decoders: Mapping[str, Decode | None]) -> DataRow:
    try:
        return DataRow(where, _record(line, decoders, sparse=False))
    except ValueError as error:
        return DataRow(where, fault=f"not JSON in a column of JSON: {error}")


def _record(record: dict[str, Any], decoders: Mapping[str, Decode | None], *, sparse: bool) -> dict[str, Any]:
    return {
        name: _decode_cell(decoders[name], value) for name, value in record.items() if not (sparse and value is None)
    }


def _decode_cell(decode: Decode | None, value: Any) -> Any:
    return value if decode is None or value is None else decode(value)


class _Columns:
    """The columns of a file, and the conversion of their values to plain data."""

    def __init__(self, path: Path, schema: pa.Schema, needed: Collection[str] | None, *, sparse: bool) -> None:
        self._path, self._schema, self._needed, self._sparse = path, schema, needed, sparse

    def decoders(self, columns: list[str]) -> dict[str, Decode | None]:
        """Return the decoder of each column that is read; None: its values are plain already.

        Raises:
            DataError: a column is missing, or contains what JSON cannot hold.
        """
        names = self._schema.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise DataError(f"data file {self._path} has no column {missing[0]!r}. It has {', '.join(names)}.")
        features = _features(self._schema)
        readable: dict[str, Decode | None] = {}
        refused: dict[str, str] = {}
        for name in columns or names:
            try:
                readable[name] = self._decoder(self._schema.field(name).type, features.get(name))
            except _UnreadableTypeError as error:
                if self._needed is None or name in self._needed:
                    refused[name] = str(error)
        for name, kind in refused.items():
            others = ",".join(readable)
            do = f"Leave it out with --columns {others}, or write" if others and self._needed is None else "Write"
            why = f"column {name!r} holds {kind}, which JSON can't hold. {do} it as text."
            raise DataError(f"data file {self._path}: {why}")
        return readable

    def _decoder(self, kind: pa.DataType, feature: Any) -> Decode | None:
        """Return the decoder of a type's values to plain data; None: they are plain.

        Raises:
            _UnreadableTypeError: JSON cannot hold them.
        """
        from pyarrow import types

        named = feature.get("_type") if isinstance(feature, dict) else None
        if named in _STORED_OTHERWISE:
            raise _UnreadableTypeError(f"{named} of datasets")
        if named == "Json" or getattr(kind, "extension_name", None) == _JSON:
            return read_json
        if types.is_dictionary(kind):
            return self._decoder(kind.value_type, None)
        if _is(kind, _LISTS):
            inner = feature[0] if isinstance(feature, list) and feature else None
            decode = self._decoder(kind.value_type, feature.get("feature") if isinstance(feature, dict) else inner)
            return None if decode is None else lambda items: [_decode_cell(decode, item) for item in items]
        if types.is_struct(kind):
            of_fields = feature if isinstance(feature, dict) and not isinstance(named, str) else {}
            fields = {field.name: self._decoder(field.type, of_fields.get(field.name)) for field in kind}
            if not self._sparse and not any(fields.values()):
                return None
            return lambda record: _record(record, fields, sparse=self._sparse)
        if _is(kind, _PLAIN):
            return None
        raise _UnreadableTypeError(str(kind))


def _features(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the features that `datasets` wrote into a file."""
    try:
        features = read_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _is(kind: pa.DataType, checks: tuple[str, ...]) -> bool:
    from pyarrow import types

    return any(getattr(types, check)(kind) for check in checks if hasattr(types, check))  # some came with pyarrow 16
