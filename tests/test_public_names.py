"""The public names of the package: complete, visible, and loaded when they are used."""

import subprocess
import sys

import pytest

import onelayer


def test_every_public_name_can_be_loaded_and_nothing_else_is_listed():
    for name in onelayer.__all__:
        assert getattr(onelayer, name) is not None
    assert {name for name in dir(onelayer) if not name.startswith("_")} == set(onelayer.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'onelayer' has no attribute 'nonsense'"):
        _ = onelayer.nonsense


def test_the_import_loads_no_library():
    code = "import sys, onelayer; sys.exit(bool({'numpy', 'scipy', 'sklearn'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_of_functions_can_be_imported_by_their_public_names():
    from onelayer.files import dask_arrays

    assert onelayer.files.dask_arrays is dask_arrays
