"""Defines the variants of a case for ``worker.py``; see ``gradients.py``."""

OTHER_SUMS = {"other-sums": 2, "sums-of-a-quarter": 4}
"""Variants of a case that compute the sums of matrix multiplications in another order.

The value of each variant is a divisor of the number of terms: the first half or the first quarter
of the terms is added last. With only one other order, sums could happen to be almost equal to the
usual sums. With two other orders, this is unlikely.
"""
SCALED_LAYER = "scaled-layer"
"""Error added on purpose: the gradients of one layer are too small by a factor of 1 - 1e-4."""
LOST_TOKEN = "lost-token"
"""Error added on purpose: the loss of one token in one microbatch is omitted."""
PLANTED = (SCALED_LAYER, LOST_TOKEN)
MISSING_SHARE = 1e-4
