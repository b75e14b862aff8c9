"""`python -m hvd_dyncomp probe`: what an exchange of gradients takes on this job's ranks, devices and network."""
