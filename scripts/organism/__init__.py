"""How the testbed's model organism is made: its training text, its base model, and what is measured of checkpoints."""
