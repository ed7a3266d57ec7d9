"""Training: batches to weights, in a folder from which a killed run resumes."""
