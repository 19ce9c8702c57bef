"""Trace + Plan -> Schedule -> Timeline; planners and reports. Never imports torch."""
