"""Contains soak tests: programs that cause random faults for a long time and check the effects."""
