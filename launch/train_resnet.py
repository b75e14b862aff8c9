"""Trains a ResNet on several workers while a controller moves the bit-width of the gradients; see --help."""

from train.program import main

if __name__ == "__main__":
    main()
