"""Print the changelog's section of a tag's version; fail if that is not the version of the package.

python .github/release_notes.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str) -> str:
    """Return the section of CHANGELOG.md for a tag such as v0.1.0.

    Raises:
        SystemExit: for another version than the package's, or one without a section.
    """
    version = tag.removeprefix("v")
    (own,) = re.findall(r'__version__ = "(.*)"', (ROOT / "fp8stack/version.py").read_text())
    if own != version:
        raise SystemExit(f"{tag} is not the version of the package, {own}")
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if not found:
        raise SystemExit(f"CHANGELOG.md has no section {version}")
    return found[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))  # noqa: T201
