"""The command `simulate`, also as `python -m simulator`."""

from traces.processes import stoppable_imports


def run() -> None:
    """Run the command."""
    with stoppable_imports():
        from simulator.cli.main import main
    main(prog_name="simulate")


if __name__ == "__main__":
    run()
