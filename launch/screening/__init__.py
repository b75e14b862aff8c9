"""Which way of sending few bits trains best: many small trainings in one process each, and a table of them."""
