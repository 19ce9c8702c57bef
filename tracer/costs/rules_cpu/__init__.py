"""What ops allocate inside on a CPU, by rules."""
