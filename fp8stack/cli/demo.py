"""`fp8stack demo`: train one small GPT with and without FP8, compare them, and write a report.

The demo is `examples/demo.py`, with the few modules that it imports: an example of how the library is used. The wheel
has them in `fp8stack/examples/`. It needs torch alone. The exit status is 1 if a level failed, or trained worse.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from importlib import import_module
from pathlib import Path

from .output import show

FOLDER = next(f for p in Path(__file__).resolve().parents[1:3] if (f := p / "examples").is_dir())


def run(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(FOLDER))
    demo = import_module("demo")
    data = demo.run(options)
    show(options, data, demo.draw)
    if options.open and data["report"]:
        webbrowser.open(Path(data["report"]).resolve().as_uri())
    return 1 if data["problems"] else 0
