"""The command `trace`, also as `python -m tracer`."""

from traces.processes import stoppable_imports


def run() -> None:
    """Run the command."""
    with stoppable_imports():
        from tracer.cli.main import trace
    trace(prog_name="trace")


if __name__ == "__main__":
    run()
