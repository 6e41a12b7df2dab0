"""Transports for a stream of versions: a folder, HTTP, and ``torch.distributed.broadcast``."""
