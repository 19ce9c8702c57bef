"""The command `execute`, also as `python -m executor`."""

from functools import partial

from traces.processes import run_command

run = partial(run_command, "executor.cli.main:execute", "execute")
if __name__ == "__main__":
    run()
