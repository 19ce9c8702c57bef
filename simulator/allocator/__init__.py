"""Turn allocations and frees into what CUDA's caching allocator allocates and reserves."""
