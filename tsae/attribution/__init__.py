"""Which training samples did that: a run's own steps, taken apart by the samples that they were made of."""
