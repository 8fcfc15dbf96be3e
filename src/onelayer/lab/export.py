"""Export of finished cells as a table with a row per cell: CSV, or Parquet with types.

The columns are `claim`, `seed` and `status`, then `parameter.<name>` and `measured.<name>` for
every name that occurs in any cell, then `seconds`, `finished`, `code`, `key` and `error`. Values
that a cell does not have are empty. Lists are lists in Parquet, and JSON in CSV. Spreadsheets run
text that starts with =, +, - or @ as a formula, and the error of a cell can quote any input: in CSV
an apostrophe precedes such text.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onelayer.io.safetensors_files import write_whole
from onelayer.lab.claim import Result
from onelayer.lab.values import encodable

_LAST = ("seconds", "finished", "code", "key", "error")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

Columns = dict[str, list[Any]]


def write(cells: Iterable[Result], path: Path) -> None:
    """Write cells to a .csv, .txt or .parquet file, which appears once all bytes are on disk.

    Without cells there is a header only.
    """
    formats = {".csv": _csv, ".txt": _csv, ".parquet": _parquet}
    convert = formats.get(path.suffix.lower())
    if convert is None:
        expected = f"expected a name that ends in {' or '.join(formats)}"
        raise ValueError(f"the file is {path.name!r}, {expected}")
    write_whole(path, convert(_columns(list(cells))))


def _columns(cells: Sequence[Result]) -> Columns:
    """The values of every column, cell by cell, None where a cell has none."""
    columns: Columns = {
        "claim": [cell.claim for cell in cells],
        "seed": [cell.parameters.get("seed") for cell in cells],
        "status": [cell.status for cell in cells],
    }
    parameters = [{n: v for n, v in cell.parameters.items() if n != "seed"} for cell in cells]
    measured = [dict(cell.measured) for cell in cells]
    for group, mappings in (("parameter", parameters), ("measured", measured)):
        for name in dict.fromkeys(name for mapping in mappings for name in mapping):
            columns[f"{group}.{name}"] = [mapping.get(name) for mapping in mappings]
    return columns | {name: [getattr(cell, name) for cell in cells] for name in _LAST}


def _csv(columns: Columns) -> bytes:
    def harmless(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        text = _text(value)
        return f"'{text}" if text.startswith(_FORMULA) else text

    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(columns)
    writer.writerows(map(harmless, row) for row in zip(*columns.values(), strict=True))
    return encodable(table.getvalue()).encode("utf-8")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parquet(columns: Columns) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error
    # Explicit types, so that these columns have them even if all cells are empty.
    types = dict.fromkeys(("claim", "status", *_LAST), pyarrow.string())
    types |= {"seed": pyarrow.int64(), "seconds": pyarrow.float64()}
    arrays = {}
    for name, values in columns.items():  # other columns: the type all values share, or else text
        kinds = {type(value) for value in values if value is not None}
        if kinds == {bool} or bool not in kinds:  # Arrow would convert True among floats to 1
            with suppress(pyarrow.ArrowException, OverflowError, UnicodeError):
                arrays[name] = pyarrow.array(values, types.get(name))
                continue
        texts = [None if value is None else encodable(_text(value)) for value in values]
        arrays[name] = pyarrow.array(texts, pyarrow.string())
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays), table)
    return table.getvalue()
