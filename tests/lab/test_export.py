import csv
import errno
import json
import os
import sys

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from onelayer.lab import export
from onelayer.lab.claim import Result

HEADER = ["claim", "seed", "status"]
FOOTER = ["seconds", "finished", "code", "key", "error"]


def cell(parameters=None, measured=None, **more):
    """A finished cell as the store returns it."""
    about = {"claim": "noise", "key": "00ff", "code": "c0de", "seconds": 0.25}
    finished = "2026-01-02T03:04:05+00:00"
    parameters = {"seed": 3} | (parameters or {})
    return Result(parameters, measured or {}, **{"finished": finished} | about | more)


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def csv_value(value, path):
    """What stands in a CSV file for one measured value."""
    export.write([cell(measured={"value": value})], path)
    [head, row] = rows(path)
    return row[head.index("measured.value")]


def parquet_column(values, path):
    """A column of a Parquet file: its type and its values."""
    export.write([cell(measured={} if v is None else {"value": v}) for v in values], path)
    column = pyarrow.parquet.read_table(path)["measured.value"]
    return str(column.type), column.to_pylist()


@pytest.fixture
def table(tmp_path):
    return tmp_path / "cells.csv"


@pytest.fixture
def typed(tmp_path):
    return tmp_path / "cells.parquet"


CELLS = [
    cell({"heads": 2}, {"error": 0.1 + 0.2}),
    cell({"scale": 1.5}, {"found": True, "error": None}, claim="hard", seconds=7),
]
NAMES = [*HEADER, "parameter.heads", "parameter.scale", "measured.error", "measured.found", *FOOTER]


def test_columns_are_the_union_of_all_cells(table):
    export.write(CELLS, table)
    when = "2026-01-02T03:04:05+00:00"
    assert rows(table) == [
        NAMES,
        [
            "noise",
            "3",
            "done",
            "2",
            "",
            "0.30000000000000004",
            "",
            "0.25",
            when,
            "c0de",
            "00ff",
            "",
        ],
        ["hard", "3", "done", "", "1.5", "", "True", "7", when, "c0de", "00ff", ""],
    ]


def test_both_formats_hold_the_same_table(table, typed):
    for path in (table, typed):
        export.write(iter(CELLS), path)
    plain = pandas.read_csv(table, keep_default_na=False, na_values=[""])
    whole = pandas.read_parquet(typed)
    assert list(plain) == list(whole) == NAMES
    for name in NAMES:
        assert plain[name].dropna().tolist() == whole[name].replace("", None).dropna().tolist()


@pytest.mark.parametrize("name", ["cells.csv", "cells.parquet", "CELLS.CSV"])
def test_no_cells_are_a_header_only(tmp_path, name):
    export.write([], tmp_path / name)
    reader = pandas.read_parquet if name.endswith("parquet") else pandas.read_csv
    found = reader(tmp_path / name)
    assert (list(found), len(found)) == ([*HEADER, *FOOTER], 0)


def test_known_columns_have_their_types_also_if_empty(typed):
    export.write([], typed)
    types = {field.name: str(field.type) for field in pyarrow.parquet.read_schema(typed)}
    assert types == dict.fromkeys([*HEADER, *FOOTER], "string") | {
        "seed": "int64",
        "seconds": "double",
    }


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], "int64"),
        ([1, 2.5], "double"),
        ([True, False], "bool"),
        (["a", None], "string"),
        ([[[1.0, 2.0]], [[0.5]]], "list<element: list<element: double>>"),
    ],
)
def test_parquet_has_types(typed, values, kind):
    assert parquet_column(values, typed) == (kind, values)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([1, "many"], ["1", "many"]),
        ([0.5, True, None], ["0.5", "true", None]),
        ([[1], 2], ["[1]", "2"]),
        ([[1, "a"]], ['[1, "a"]']),
        ([2**70], [str(2**70)]),
        (["\udcff"], ["\\udcff"]),
    ],
)
def test_mixed_values_are_text(typed, values, texts):
    assert parquet_column(values, typed) == ("string", texts)


@pytest.mark.parametrize(
    "text", ["plain", "ä ∈ Θ", 'a "quoted", b', "two\nlines", "a\rb", "a = b", "", "'"]
)
def test_csv_gives_text_back(table, text):
    assert csv_value(text, table) == text


def test_csv_has_lists_as_json(table):
    values = [[0.1, None], ["=1", True]]
    assert json.loads(csv_value(values, table)) == values


def test_csv_has_what_is_no_text_escaped(table):
    assert csv_value("a\udcff", table) == "a\\udcff"


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_has_no_formulas(table, typed, sign):
    text = f"{sign}cmd|' /C calc'!A0"
    assert csv_value(text, table) == f"'{text}"
    export.write([cell(error=text)], table)
    assert rows(table)[1][-1] == f"'{text}"
    assert parquet_column([text], typed) == ("string", [text])


@pytest.mark.parametrize("number", [-1, -0.5, -1e-300])
def test_csv_has_negative_numbers_as_numbers(table, number):
    assert csv_value(number, table) == repr(number)


@pytest.mark.parametrize("name", ["cells.xlsx", "cells", ".csv"])
def test_other_names_are_refused(tmp_path, name):
    expected = rf"the file is '{name}', expected a name that ends in \.csv or \.txt or \.parquet"
    with pytest.raises(ValueError, match=expected):
        export.write([], tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_old_file_stays_whole(tmp_path, monkeypatch, suffix, trouble):
    path = tmp_path / f"cells.{suffix}"
    path.write_bytes(b"before")

    def fail(_):
        raise trouble

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(trouble)):
        export.write(CELLS, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_parquet_says_what_to_install(typed, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"which is not installed: pip install pyarrow"):
        export.write(CELLS, typed)
