"""What is changed in a captured graph, one concern a file."""
