"""Runs one step of a pipeline rank in the order that its policy picks.

Owns the executor, its adapter to megatron-core's forward and backward steps, weight gradients that
are put off, the agreement of a decision group, and what every training program shares: how
far the run is, when it stops, its trace. It knows no model, no checkpoint and no command line.
"""
