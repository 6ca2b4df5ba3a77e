"""The subcommands, a file each: ``main(argv)`` takes the arguments behind the name.

It returns the exit status, 0 where its docstring names no other, and raises an ``AdaptiveError``
for what a user can mend, such as ``ConfigError`` for a wrong option or file and ``SetupError`` for
what the machine lacks; ``run_cli`` prints that as one line and gives status 2.
"""
