"""The command `trace`, also as `python -m tracer`."""

from functools import partial

from traces.processes import run_command

run = partial(run_command, "tracer.cli.main:trace", "trace")
if __name__ == "__main__":
    run()
