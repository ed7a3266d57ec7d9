"""One trajectory as its log has it, and the checks of its values."""
