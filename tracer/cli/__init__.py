"""The command `trace`, one file a subcommand."""
