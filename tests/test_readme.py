import re
import subprocess
import sys
from pathlib import Path

import pytest

from onelayer.lab.claims import known

ROOT = Path(__file__).parents[1]


def blocks_of(page, language):
    """The blocks of a page in a language, one after the other."""
    text = (ROOT / page).read_text("utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no block of {language}"
    return "\n".join(blocks)


@pytest.mark.slow
def test_examples_of_the_readme_print_what_it_shows(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks_of("README.md", "python")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.split() == blocks_of("README.md", "text").split()


def test_examples_of_the_page_on_certificates_run(capsys):
    exec(blocks_of("docs/certificates.md", "python"), {})
    printed, stderr = capsys.readouterr()
    assert printed.split() == ["True", "EXACT", "7", "True", "True"]
    assert stderr == ""


def test_the_table_of_the_results_has_every_claim():
    results = (ROOT / "docs" / "results.md").read_text("utf-8")
    table = results[results.index("| Claim | Prediction | Measured | Verdict |") :]
    titles = [claim.title for claim in known().values()]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == len(titles)
    for title, row in zip(titles, rows, strict=True):
        text = row.replace("\\", "").removeprefix("| ")
        assert text.startswith(title), f"{title} is not where it should be"
    assert "undecided" not in table
