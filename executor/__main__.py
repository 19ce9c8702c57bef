"""`python -m executor` is `execute`."""

from executor.cli import main

if __name__ == "__main__":
    main()
