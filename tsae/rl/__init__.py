"""Features put to use in training: credit, reformulation, a curriculum, and TRL's trainer with them."""
