import re
import subprocess
import sys
from pathlib import Path

import pytest

from onelayer.lab.claims import known

README = Path(__file__).parents[1] / "README.md"


def code_of(page):
    """The python examples of a page, one after the other."""
    text = (README.parent / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no python example"
    return "\n".join(blocks)


@pytest.mark.slow
def test_examples_of_the_readme_run_in_a_new_process(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code_of("README.md")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "False" not in result.stdout
    assert result.stdout.split().count("True") == 4


def test_examples_of_the_page_on_certificates_run(capsys):
    exec(code_of("docs/howto/read-a-certificate.md"), {})
    printed, stderr = capsys.readouterr()
    first = ["True EXACT", "7 of 8 directions", "True", "True"]
    assert printed.splitlines() == [*first, "HEADS_NOT_DETERMINED", "True"]
    assert stderr == ""


def test_the_table_of_claims_is_the_one_of_the_results():
    results = (README.parent / "docs" / "results.md").read_text("utf-8")
    table = results[results.index("| Claim | Prediction | Measured | Verdict |") :]
    assert table in README.read_text("utf-8")
    titles = [claim.title for claim in known().values()]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == len(titles)
    for title, row in zip(titles, rows, strict=True):
        text = row.replace("\\", "").removeprefix("| ")
        assert text.startswith(title), f"{title} is not where it should be"
    assert "undecided" not in table
