"""The commands of gpukiln in a checkout: `invoke --list`, `invoke ami.build -h`."""

import sys

from invoke import main as invoke

from gpukiln.cli.main import INVOKE, main

if __name__ == "__main__" or invoke.program.argv:  # Invoke's own program has found this file
    sys.exit(main(sys.argv[1:], INVOKE))
