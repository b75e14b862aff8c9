"""What a step costs, and what it would cost on more hosts."""
