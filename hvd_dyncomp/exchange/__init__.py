"""How gradients travel: buckets, messages, and which rank sends what to which."""
