"""The command `simulate`."""
