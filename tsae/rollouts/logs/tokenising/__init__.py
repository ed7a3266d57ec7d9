"""Token ids for the texts of a log."""
