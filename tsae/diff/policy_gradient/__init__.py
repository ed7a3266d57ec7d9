"""What rollouts push: predicted shifts of features, and the influence of training samples."""
