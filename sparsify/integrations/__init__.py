"""Other libraries' training: what sparsify adds to them."""
