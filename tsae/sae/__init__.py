"""The temporal sparse autoencoder: config, model, loss, training, evaluation."""
