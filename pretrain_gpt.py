"""Train GPT; the options are Megatron-LM's. See ``python pretrain_gpt.py --help``."""

import sys

from megatron.adaptive.cli.pretrain_gpt import run

if __name__ == "__main__":
    sys.exit(run())
