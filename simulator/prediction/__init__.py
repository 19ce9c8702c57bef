"""One step: what it needs, the plan within a budget and the levers that it takes, what must be said beside."""
