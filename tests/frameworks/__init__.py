"""Plans in other people's loops, with the real packages.

In an environment of their own (they bring dozens of packages): `.ci/frameworks`. Or, where they are installed:
`python -m pytest -m frameworks tests/frameworks`. A test whose package is missing is skipped and says so.
"""
