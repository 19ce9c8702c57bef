"""`python -m tracer` is `trace`."""

from tracer.cli import main

if __name__ == "__main__":
    main()
