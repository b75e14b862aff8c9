"""What the docs show of whole trainings: the paper's scenarios, and experiments with simulated workers."""
