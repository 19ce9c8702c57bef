"""Run torch's own CUDA code on a driver that does nothing, and read what memory a training step takes."""
