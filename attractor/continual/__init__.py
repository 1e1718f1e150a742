"""Learning while running."""
