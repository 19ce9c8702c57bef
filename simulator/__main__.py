"""`python -m simulator` is the command `simulate`."""

from simulator.cli.main import main

if __name__ == "__main__":
    main(prog_name="simulate")
