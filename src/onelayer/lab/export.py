"""Export of measured cells as a table, a row a cell: CSV, or Parquet with types.

Columns are `claim`, `seed` and `status`, then `parameter.<name>` and `measured.<name>` for every
name that occurs in any cell, then `seconds`, `finished`, `code`, `key` and `error`. What a cell
does not have is left empty. Parquet keeps lists as lists; in CSV they are JSON.

A spreadsheet takes text that begins with =, +, - or @ for a formula and may run it, and text in
a cell can come from anywhere: an error quotes what upset it. So in CSV such text, never a number,
gets an apostrophe before it, as spreadsheets mark text themselves. Parquet has it as it is.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onelayer.io.safetensors_files import write_whole

_LAST = ("seconds", "finished", "code", "key", "error")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Columns = dict[str, list[Any]]


def write(cells: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write cells to a .csv or .parquet file, in one move once all bytes are on disk.

    Each has `claim`, `key`, `status`, `code`, `seconds`, `finished`, `error` and the dictionaries
    `parameters` and `measured`. Without cells there is a header only.
    """
    formats: dict[str, Callable[[Columns], bytes]] = {".csv": _csv, ".parquet": _parquet}
    suffix = path.suffix.lower()
    if suffix not in formats:
        raise ValueError(
            f"the file is {path.name!r}, expected a name that ends in {' or '.join(formats)}"
        )
    write_whole(path, formats[suffix](_columns(list(cells))))


def _columns(cells: Sequence[Mapping[str, Any]]) -> Columns:
    """The values of every column, cell by cell, None where a cell has none."""

    def names(group: str) -> Iterable[str]:
        return dict.fromkeys(name for cell in cells for name in cell[group])

    def values(group: str, name: str) -> list[Any]:
        return [cell[group].get(name) for cell in cells]

    return {
        "claim": [cell["claim"] for cell in cells],
        "seed": values("parameters", "seed"),
        "status": [cell["status"] for cell in cells],
        **{f"parameter.{n}": values("parameters", n) for n in names("parameters") if n != "seed"},
        **{f"measured.{n}": values("measured", n) for n in names("measured")},
        **{name: [cell[name] for cell in cells] for name in _LAST},
    }


def _csv(columns: Columns) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(map(_harmless, row))
    return table.getvalue().encode("utf-8", "backslashreplace")


def _harmless(value: Any) -> Any:
    """A number, or text that no spreadsheet takes for a formula."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = _text(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parquet(columns: Columns) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Parquet needs pyarrow, which is not installed: pip install 'onelayer[table]'"
        ) from error
    # Given types, so that these columns have them also where all cells are empty.
    types = dict.fromkeys(("claim", "status", *_LAST), pyarrow.string())
    types |= {"seed": pyarrow.int64(), "seconds": pyarrow.float64()}
    arrays = {name: _array(values, types.get(name)) for name, values in columns.items()}
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), table)
    return table.getvalue()


def _array(values: list[Any], kind: Any) -> Any:
    """A column of this type or else of the one that all values have, of text if there is none."""
    import pyarrow

    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool} or bool not in kinds:  # Arrow would take True among floats for 1
        with suppress(pyarrow.ArrowException, OverflowError, UnicodeError):
            return pyarrow.array(values, kind)
    texts = [None if value is None else _text(value) for value in values]
    # Half a surrogate pair, as in names of files that are no UTF-8, cannot be written.
    whole = [text and text.encode("utf-8", "backslashreplace").decode("utf-8") for text in texts]
    return pyarrow.array(whole, pyarrow.string())
