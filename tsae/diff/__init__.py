"""What changed, who changed it, and how sure are we: contrasts of features with their uncertainty."""
