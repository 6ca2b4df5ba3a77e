"""Names of what ``worker.py`` can do differently to a case, see ``gradients.py``."""

OTHER_SUMS = {"other-sums": 2, "sums-of-a-quarter": 4}
"""Variants of a case that take the sums of matrix products in another order.

Maps each to a divisor of the number of terms: the first half, or the first quarter, comes last. One
order may by chance give almost the same sums as the usual one, but hardly both.
"""
SCALED_LAYER = "scaled-layer"
"""Planted error: of the gradients of one layer, a share of 1e-4 is missing."""
LOST_TOKEN = "lost-token"
"""Planted error: the loss of one token of one microbatch is left out."""
PLANTED = (SCALED_LAYER, LOST_TOKEN)
MISSING_SHARE = 1e-4
