"""The front end for Horovod's optimizer: `DynamicQuantizer`, and `TorchState` of elastic training keeps it."""
