"""Planners that are easy to think of, to compare the product's own with.

Each is a planner like those of `simulator.planners`, and every command takes it by its place, from the repository's
root: `python -m simulator compare TRACE --budget 60% --planners search,tests.bench.baselines.min_cut:plan`.
"""
