"""Runs the benchmarks and redraws docs/benchmarks.md and its tables; see --help."""

from benchmarks.program import main

if __name__ == "__main__":
    main()
