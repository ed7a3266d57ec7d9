"""Quality of a trained SAE: reconstruction, smoothness, separation, stability, loss recovered."""
