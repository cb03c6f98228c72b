"""`python -m gpukiln.gpus` is `gpukiln-gpu`."""

import sys

from gpukiln.gpus.cli import main

sys.exit(main())
