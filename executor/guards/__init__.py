"""What holds a plan to its model: what a capture depended on, wrappers around it, a twin, and why a plan is refused."""
