"""The checks run on every rank."""

from process_group import folder, one_order, process_group, rank, size  # noqa: F401  # fixtures
