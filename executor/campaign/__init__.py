"""A file of cases -> many measured plans -> the report of how wrong the predictions were."""
