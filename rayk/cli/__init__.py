"""The `rayk` command: one module per subcommand, everything heavy imported inside it.

Diagnostics go to stderr, results to stdout. A UserError is one message on stderr and exit code 2.
"""
