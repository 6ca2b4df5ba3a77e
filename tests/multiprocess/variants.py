"""Names of what ``worker.py`` can do differently to a case, see ``gradients.py``."""

OTHER_SUMS = "other-sums"
"""Variant of a case that takes every sum in another order."""
SCALED_LAYER = "scaled-layer"
"""Planted error: of the gradients of one layer, a share of 1e-4 is missing."""
LOST_TOKEN = "lost-token"
"""Planted error: the loss of one token of one microbatch is left out."""
PLANTED = (SCALED_LAYER, LOST_TOKEN)
MISSING_SHARE = 1e-4
