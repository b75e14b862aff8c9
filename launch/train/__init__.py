"""Training with compressed gradients: data, models, the loop, checkpoints."""
