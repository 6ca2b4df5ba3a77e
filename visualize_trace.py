"""Draw a pipeline's trace as .xlsx and .png; see --help."""

import sys

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.trace import visualize

if __name__ == "__main__":
    sys.exit(run_cli(visualize))
