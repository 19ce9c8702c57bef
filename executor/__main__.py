"""The command `execute`, also as `python -m executor`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command; Ctrl-C while its modules are still being imported ends it as later: exit code 130."""
    try:
        from executor.cli.main import execute
    except KeyboardInterrupt:
        print("Error: stopped.", file=sys.stderr)
        sys.exit(130)
    execute(prog_name="execute")


if __name__ == "__main__":
    run()
