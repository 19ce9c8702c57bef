"""`python -m executor` is `execute`."""

from executor.cli.main import main

if __name__ == "__main__":
    main()
