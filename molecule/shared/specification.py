"""Prints which stand-in packages a repository has, for tests/e2e/standin/build.py: names come before versions.

python specification.py cuda_apt 535.309.01 580.178.04
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/e2e"))

from standin import packages  # noqa: E402 - found only now

make = getattr(packages, sys.argv[1])
print(json.dumps(packages.specification(one for version in sys.argv[2:] for one in make(version))))
