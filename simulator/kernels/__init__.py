"""The inner loops of planning and simulation, compiled."""
