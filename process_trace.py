"""Print the figures of a pipeline's trace and write its events; see --help."""

import sys

from megatron.adaptive.cli.common import run_cli
from megatron.adaptive.cli.trace import process

if __name__ == "__main__":
    sys.exit(run_cli(process))
