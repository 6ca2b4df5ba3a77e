"""Contains the subcommands and their modes, which ``megatron.adaptive.__main__`` lists.

Each has a function such as ``main(argv)``, which takes the arguments after the subcommand. It
returns the exit status: 0, unless its docstring lists other values. For an error that the user can
fix, the function raises an ``AdaptiveError``: for example ``ConfigError`` for a wrong option or
file, ``SetupError`` if the machine lacks software or hardware. ``run_cli`` prints such an error as
one line and returns status 2.
"""
