"""The command `execute`, also as `python -m executor`."""

from traces.processes import stoppable_imports


def run() -> None:
    """Run the command."""
    with stoppable_imports():
        from executor.cli.main import execute
    execute(prog_name="execute")


if __name__ == "__main__":
    run()
