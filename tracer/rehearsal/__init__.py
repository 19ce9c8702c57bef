"""Run torch's own CUDA code on a driver that does nothing, and read what memory a training step takes."""

from tracer.rehearsal.jobs import Job
from tracer.rehearsal.record import Alive, Iteration, Peaks, Rehearsal
from tracer.rehearsal.run import rehearse, run_on_null_driver

__all__ = ["Alive", "Iteration", "Job", "Peaks", "Rehearsal", "rehearse", "run_on_null_driver"]
