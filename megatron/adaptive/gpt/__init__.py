"""Builds megatron-core's GPT in any placement of stages, and runs its steps.

Owns the process groups, model, embedding, optimizer, dropout and forward step of one rank. The
folder ``training`` decides when to take a step, and what to log and save.
"""
