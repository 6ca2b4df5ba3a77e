"""Contains the subcommands, one per file. ``main(argv)`` gets the arguments after the subcommand.

``main`` returns the exit status: 0, unless its docstring describes others. For an error that the
user can fix, ``main`` raises an ``AdaptiveError``, such as ``ConfigError`` for a wrong option or
file, or ``SetupError`` for something missing on the machine. ``run_cli`` prints such an error as
one line and returns status 2.

"""
