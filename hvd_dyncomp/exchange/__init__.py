"""How gradients travel: which one in which bucket, what is in a message, who sends what to whom."""
