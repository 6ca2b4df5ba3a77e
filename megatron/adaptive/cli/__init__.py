"""Contains the subcommands and their modes, which ``megatron.adaptive.__main__`` lists.

Their functions, such as ``main(argv)``, get the arguments after the subcommand. They return the
exit status: 0, unless the docstring describes others. For an error that the user can fix, they
raise an ``AdaptiveError``, such as ``ConfigError`` for a wrong option or file, or ``SetupError``
for something missing on the machine. ``run_cli`` prints such an error as one line and returns
status 2.
"""
