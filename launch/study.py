"""Trains what the study lacks, and writes its tables and figures; see --help."""

from studies.program import main

if __name__ == "__main__":
    main()
