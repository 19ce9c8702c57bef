"""Trace + Plan -> Schedule -> Timeline: what a plan does to a step, and what it comes to."""
