"""What the docs show of whole trainings: the paper's scenarios, and trainings with simulated workers."""
