"""Change a captured graph, one concern a file."""
