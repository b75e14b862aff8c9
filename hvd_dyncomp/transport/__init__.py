"""Who carries the bytes: `base` has the contract, `horovod` and `in_process` keep it."""
