"""What all front ends share: a model's steps, what all ranks agree on when it is made, and states to save."""
