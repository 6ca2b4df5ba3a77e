"""Plans how to use the GPUs at hand best.

Inputs are a model, a cluster and a profile; a plan is what comes out, and a prediction says what it
takes. Runs without torch.
"""
