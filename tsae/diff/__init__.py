"""What changed inside: features compared across checkpoints and outcomes, with sizes, certainty and controls."""
