"""A stand-in for the CUDA driver: torch's own caching allocator runs on it without a GPU, and serves random programs.

`runtime.c` takes the place of the CUDA runtime's functions that the allocator calls: memory is addresses only, events
are passed when they are told to be. With gcc, the CUDA headers and a CUDA build of torch
(here 2.11.0, 2.12.1, 2.13.0, 2.15.0):

    python -m tests.standin.run OUT --headers /usr/local/cuda/include --programs 24

writes OUT, a gzipped pickle of programs as `tests/core/test_torch_allocator.py` reads them. What runs is the
allocator's host code, so what it shows is where blocks lie and what is reserved, and nothing that a GPU would do.
"""
