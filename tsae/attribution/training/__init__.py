"""What a run was: the settings that its trainer left, its loss, its optimiser, and which rows each update used."""
