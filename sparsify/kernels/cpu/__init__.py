"""The C++ forms of the hot loops, compiled on first use."""
