"""What is compared with what, and the Δ of every feature."""
