"""Soaks: programs that damage, kill, interrupt and fill up, at random and for a long time."""
