"""The tables of README.md and docs/ that show measurements, written from the records.

    python benchmarks/tables.py            # writes them
    python benchmarks/tables.py --check    # changes nothing; exit status 1 if one differs from its records

A document says where a table goes, with two comments on lines of their own; what is between them is replaced:

    <!-- table: memory -->
    <!-- /table -->

`record_tables.py` has most of them, `training_tables.py` long runs, `seed_tables.py` deterministic ones over seeds.
Sentences around a table that repeat one of its numbers are not written from here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import record_tables
import seed_tables
import training_tables

ROOT = Path(__file__).resolve().parents[1]
TABLES = record_tables.TABLES | training_tables.TABLES | seed_tables.TABLES
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BEGIN, END = "<!-- table:", "<!-- /table -->"
PLACE = re.compile(rf"^({BEGIN} (\S+) -->)\n.*?^{END}$", re.S | re.M)


def places(text: str) -> list[str]:
    """Return the names of the tables that a document has places for.

    Raises:
        ValueError: for a name that TABLES does not have, and for a place without an end.
    """
    names = [name for _, name in PLACE.findall(text)]
    unknown = set(names) - set(TABLES)
    if unknown:
        raise ValueError(f"there is no table {sorted(unknown)[0]!r}; known: {', '.join(TABLES)}")
    if not len(names) == text.count(BEGIN) == text.count(END):
        raise ValueError(
            f"a place for a table is a line {BEGIN} NAME --> and a line {END}; complete are those for {names}"
        )
    return names


def rewrite(text: str) -> str:
    """Return a document with its tables written anew."""
    return PLACE.sub(lambda place: "\n".join((place[1], *TABLES[place[2]](), END)), text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if one differs")
    options = parser.parse_args(argv)
    different, unused = [], set(TABLES)
    for path in DOCUMENTS:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        try:
            unused -= set(places(text))
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        new = rewrite(text)
        if new != text:
            different.append(name)
            if not options.check:
                path.write_text(new)
    what = "differ from their records" if options.check else "written"
    print(f"{what}: {', '.join(different)}" if different else "every table is as its records say")
    if unused:
        print(f"in no document: {', '.join(sorted(unused))}", file=sys.stderr)
    return 1 if options.check and (different or unused) else 0


if __name__ == "__main__":
    sys.exit(main())
