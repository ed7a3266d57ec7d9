"""What the run was: its settings, its loss, its optimiser, and whether the log fits them."""
