"""The command `simulate`, also as `python -m simulator`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command; Ctrl-C while its modules are still being imported ends it as later: exit code 130."""
    try:
        from simulator.cli.main import main
    except KeyboardInterrupt:
        print("Error: stopped.", file=sys.stderr)
        sys.exit(130)
    main(prog_name="simulate")


if __name__ == "__main__":
    run()
