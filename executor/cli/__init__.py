"""The command `execute`, one file a subcommand."""
