"""Contains the subcommands, one per file. ``main(argv)`` gets the arguments after the subcommand.

It returns the exit status: 0, unless its docstring names another. It raises an ``AdaptiveError``
for what a user can fix, such as ``ConfigError`` for a wrong option or file and ``SetupError`` for
something that the machine lacks. ``run_cli`` prints such an error as one line and returns status 2.

"""
