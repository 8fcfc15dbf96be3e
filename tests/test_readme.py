import re
import subprocess
import sys
from pathlib import Path

import pytest

from onelayer.lab.claims import known

README = Path(__file__).parents[1] / "README.md"
CERTIFICATES = ["True", "EXACT", "7", "True", "True"]


@pytest.mark.parametrize(
    ("page", "printed"), [("README.md", ["True"] * 4), ("docs/certificates.md", CERTIFICATES)]
)
def test_the_examples_run_as_printed_one_after_the_other(tmp_path, page, printed):
    text = (README.parent / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no python example"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "False" not in result.stdout
    told = [line for line in result.stdout.split() if line == "True" or page != "README.md"]
    assert told == printed


def test_the_table_of_claims_is_the_one_of_the_results():
    results = (README.parent / "docs" / "results.md").read_text("utf-8")
    table = results[results.index("| Claim | Prediction | Measured | Verdict |") :]
    assert table in README.read_text("utf-8")
    titles = [claim.title for claim in known().values()]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == len(titles)
    for title, row in zip(titles, rows, strict=True):
        told = row.replace("\\", "").removeprefix("| ")
        assert told.startswith(title), f"{title} is not where it should be"
    assert "undecided" not in table
