"""Draw a pipeline's trace as .xlsx and .png; see --help."""

import sys

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.visualize_trace import main

if __name__ == "__main__":
    sys.exit(run_cli(main))
