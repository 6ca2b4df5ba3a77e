"""Names the variants of a case for ``worker.py``, see ``gradients.py``."""

OTHER_SUMS = {"other-sums": 2, "sums-of-a-quarter": 4}
"""Variants of a case that compute the sums of matrix multiplications in another order.

Each maps to a divisor of the number of terms: the first half, or the first quarter, is added last.
A single order may by chance give almost the same sums as the usual order, two hardly.
"""
SCALED_LAYER = "scaled-layer"
"""Planted error: the gradients of one layer are too small by a factor of 1e-4."""
LOST_TOKEN = "lost-token"
"""Planted error: the loss of one token of one microbatch is omitted."""
PLANTED = (SCALED_LAYER, LOST_TOKEN)
MISSING_SHARE = 1e-4
