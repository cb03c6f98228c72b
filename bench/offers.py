"""How long a list of offers takes from shipped data, beside the start of Python and of `invoke --list`.

    scripts/run python -m bench.offers

See bench/README.md, "Finding a machine".
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR_S = 0.5
TIMES = 9
ROOT = Path(__file__).parents[1]
ROWS = {
    "python": [sys.executable, "-c", "pass"],
    "invoke --list": ["invoke", "--list"],
    "offer.list": ["invoke", "offer.list", "--gpu", "T4:1", "--cpu", "8", "--regions", "us-west-2,us-east-1"],
}


def main() -> int:
    """Take turns, so that what else the machine does hits all rows alike."""
    took: dict[str, list[float]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "GPUKILN_HOME": home}
        for _ in range(TIMES):
            for name, command in ROWS.items():
                began = time.perf_counter()
                subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
                took[name].append(time.perf_counter() - began)
    for name, seconds in took.items():
        print(f"{name:14} {statistics.median(seconds):6.3f} s  best {min(seconds):.3f}")
    return int(statistics.median(took["offer.list"]) > BAR_S)


if __name__ == "__main__":
    sys.exit(main())
