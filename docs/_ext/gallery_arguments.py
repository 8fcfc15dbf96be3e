"""Arguments with which the gallery runs examples: sizes that take seconds."""

from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[2] / "build"
ARGUMENTS = {
    "digits_as_sets.py": ["--examples", "300"],
    "own_claim.py": ["--largest", "1024", "--workers", "1", "--folder", str(BUILD)],
}
SHOWN_ONLY = ("conditions_in_practice", "real_transformer")  # they need a pretrained model


def arguments(_config: dict[str, Any], script: dict[str, Any]) -> list[str]:
    """Return the arguments of an example, for sphinx-gallery."""
    BUILD.mkdir(exist_ok=True)
    return ARGUMENTS.get(Path(script["src_file"]).name, [])
