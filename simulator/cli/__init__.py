"""The command `simulate`, one file a subcommand."""
