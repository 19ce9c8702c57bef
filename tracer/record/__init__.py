"""Captured graph + loss code + optimizer -> Trace."""
