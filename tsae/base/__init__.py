"""Base: what every other folder may use, and what knows none of them."""
