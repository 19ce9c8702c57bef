"""Recordings of a real GPU's allocator, replayed through the simulated one."""
