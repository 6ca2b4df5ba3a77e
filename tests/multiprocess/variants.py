"""Defines the variants of a case for ``worker.py``, which ``gradients.py`` implements."""

OTHER_SUMS = {"other-sums": 2, "sums-of-a-quarter": 4}
"""Variants of a case that compute matrix multiplications with a different order of summation.

A value of n means that the first 1/n of the terms is added last. A single alternative order could
happen to give almost the usual sums. With two alternative orders, this is unlikely.
"""
SCALED_LAYER = "scaled-layer"
"""Error added on purpose: the gradients of one layer are too small by a factor of 1 - 1e-4."""
LOST_TOKEN = "lost-token"
"""Error added on purpose: the loss of one token in one microbatch is omitted."""
PLANTED = (SCALED_LAYER, LOST_TOKEN)
MISSING_SHARE = 1e-4
