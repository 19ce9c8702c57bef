"""An op -> its time, and what it allocates while it runs."""
