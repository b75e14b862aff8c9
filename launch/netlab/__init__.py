"""Hosts that are network namespaces of this machine, over links of a given rate."""
