import re
import subprocess
import sys
from pathlib import Path

from onelayer.lab.claims import known

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run_as_printed_one_after_the_other(tmp_path):
    blocks = re.findall(
        r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert blocks, "README.md has no python example"
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
    assert result.stdout.count("True") == 4


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
