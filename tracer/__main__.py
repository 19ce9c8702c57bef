"""The command `trace`, also as `python -m tracer`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command; Ctrl-C while its modules are still being imported ends it as later: exit code 130."""
    try:
        from tracer.cli.main import trace
    except KeyboardInterrupt:
        print("Error: stopped.", file=sys.stderr)
        sys.exit(130)
    trace(prog_name="trace")


if __name__ == "__main__":
    run()
