"""Implements the subcommands and their modes, which ``megatron.adaptive.__main__`` lists.

Each subcommand or mode has a function such as ``main(argv)``, which takes the arguments after the
subcommand and returns the exit status. The status is 0 unless the function's docstring lists other
values. For errors that users can fix, the function raises an ``AdaptiveError``, such as
``ConfigError`` for a wrong option or file, or ``SetupError`` for missing software or hardware.
``run_cli`` prints such an error as one line, and returns status 2.
"""
