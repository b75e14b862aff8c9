"""What ends a program with one line and status 2."""


class RunError(Exception):
    """A mistake in the request or its surroundings that one line of text explains; the program ends with status 2."""
