"""What ops allocate inside on a GPU, by rules."""
