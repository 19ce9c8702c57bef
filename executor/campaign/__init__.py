"""A file of cases, each traced, planned and measured: what was predicted, beside it."""
