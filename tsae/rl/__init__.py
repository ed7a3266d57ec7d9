"""Features put to use in training: credit, reformulation, sampling, and TRL's trainer with them."""
