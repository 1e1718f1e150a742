"""Writing texts: sequences, the batch they share, and the engine that runs it."""
