"""The commands of `python -m hvd_dyncomp`: they use the library, and nothing in it knows them."""
