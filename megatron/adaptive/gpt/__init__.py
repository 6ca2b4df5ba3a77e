"""Builds megatron-core's GPT in any placement of stages, and runs its steps.

Owns process groups, model, embedding, optimizer, dropout and the forward step of one rank. When to
take a step, and what to log and save, is decided by ``training``.
"""
