"""Defines the variants of a case for ``worker.py``; see ``gradients.py``."""

OTHER_SUMS = {"other-sums": 2, "sums-of-a-quarter": 4}
"""Variants of a case that compute the sums of matrix multiplications in another order.

Each variant maps to a divisor of the number of terms: the first half or the first quarter of the
terms is added last. With a single other order, sums could by chance be almost equal to the usual
sums; with two this is unlikely.
"""
SCALED_LAYER = "scaled-layer"
"""Planted error: the gradients of one layer are too small by a relative error of 1e-4."""
LOST_TOKEN = "lost-token"
"""Planted error: the loss of one token in one microbatch is omitted."""
PLANTED = (SCALED_LAYER, LOST_TOKEN)
MISSING_SHARE = 1e-4
