"""Runs a schedule or a policy over the stages of a rank: one engine for every order."""
