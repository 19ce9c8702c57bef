"""Turn `python -m simulator` into the `simulate` command."""

from simulator.cli.main import main

if __name__ == "__main__":
    main(prog_name="simulate")
