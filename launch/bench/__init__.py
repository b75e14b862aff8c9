"""How fast it is: the arithmetic, the exchange, training steps, whole trainings."""
