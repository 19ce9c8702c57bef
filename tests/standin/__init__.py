"""torch's own caching allocator serves random programs on the null driver (`tracer.rehearsal`), without a GPU.

With a C compiler and a CUDA build of torch (the recordings are of 2.11.0, 2.12.1, 2.13.0 and 2.15.0):

    python -m tests.standin.run OUT --programs 24

writes OUT, a gzipped pickle of programs as `tests/core/test_torch_allocator.py` reads them. What runs is the
allocator's host code, so what it shows is where blocks lie and what is reserved, and nothing that a GPU would do.
In the committed recordings segments lie from 0x7F0000000000 on, and now from 0x200000000000.
"""
