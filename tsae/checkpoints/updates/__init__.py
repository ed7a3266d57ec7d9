"""Updates: what training changed in the weights, and how much."""
