"""Prints which stand-in packages a repository has, for tests/support/standin/build.py.

python specification.py packages.cuda_apt 535.309.01 580.178.04
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.standin.packages import specification

module, _, name = sys.argv[1].partition(".")
make = getattr(importlib.import_module(f"tests.support.standin.{module}"), name)
print(json.dumps(specification(package for version in sys.argv[2:] for package in make(version))))
