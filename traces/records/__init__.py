"""Hold the frozen records, each with its file: trace, plan, measurement."""
