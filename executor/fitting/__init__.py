"""Training within a budget from a model in hand: the step is planned, whole or in parts, and the plan applied."""
