"""Runs a program on several hosts that are network namespaces of this machine; see --help."""

from lab.program import main

if __name__ == "__main__":
    main()
