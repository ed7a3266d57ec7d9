"""What is known about the whole log: outcomes, policies, repeats, assumptions."""
