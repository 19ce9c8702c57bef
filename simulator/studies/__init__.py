"""Questions that need many answers: comparing, sweeping, the largest batch."""
