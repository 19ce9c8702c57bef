"""What CUDA's caching allocator allocates and reserves for a sequence of allocations and frees."""
