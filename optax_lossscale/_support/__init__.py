"""What all folders share: checks, trees, selection by a flag, traced programs, `flax.nnx`."""
