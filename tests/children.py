"""Environment for child processes of tests: they import package and `tests` from this checkout, installed or not."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
