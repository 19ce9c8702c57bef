"""Questions that need many answers: planning, comparing, sweeping, the largest batch."""
