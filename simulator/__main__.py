"""The command `simulate`, also as `python -m simulator`."""

from functools import partial

from traces.processes import run_command

run = partial(run_command, "simulator.cli.main:main", "simulate")
if __name__ == "__main__":
    run()
