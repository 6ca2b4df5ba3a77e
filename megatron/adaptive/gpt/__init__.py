"""Builds megatron-core's GPT model for any placement of stages, and runs its steps.

This package sets up the process groups, model, embedding, optimizer, dropout and forward step of
one rank. The package ``training`` decides when to run a step, and what to log and save.
"""
