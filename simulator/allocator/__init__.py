"""Simulate CUDA's caching allocator: what it allocates and reserves for a sequence of allocations and frees."""
