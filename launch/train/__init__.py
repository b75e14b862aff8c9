"""What train_resnet.py is made of beside its loop: data, models, options, metrics, checkpoints, and the other ranks."""
