"""Trains the paper's scenarios and two more, and writes its table and figures with our numbers in them; see --help."""

from studies.program import main

if __name__ == "__main__":
    main()
