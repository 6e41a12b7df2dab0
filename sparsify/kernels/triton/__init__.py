"""The Triton forms of the hot loops."""
