"""The order of the CUDA streams of a model's backward passes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Streams:
    """The CUDA streams of a model's backward passes, synchronized where they share memory; no host waits.

    Autograd synchronizes two nodes' streams where a gradient passes from one to the other, and that of a masked weight
    is added to memory that all nodes share. In the thread of a second device, the first one's stream is its default.
    """

    def __init__(self) -> None:
        self.seen: dict[torch.device, dict[torch.Stream, None]] = {}
        self._used: dict[torch.device, torch.Stream] = {}  # by the last forward

    def use(self, device: torch.device) -> None:
        """Records that a forward pass runs on the current stream of a device, after the last write to the weights."""
        if device.type == "cuda":
            stream = self._used[device] = torch.accelerator.current_stream(device)
            self.seen.setdefault(device, {})[stream] = None

    def are_one(self, device: torch.device) -> bool:
        """Whether all work so far was on the current stream of this GPU, so that there is nothing to wait for."""
        return len(self.seen) == 1 and list(self.seen.get(device, ())) == [torch.accelerator.current_stream(device)]

    @contextmanager
    def joined(self, device: torch.device | None = None) -> Iterator[None]:
        """A context for work on shared memory: after all earlier such work, and before all later work of any stream."""
        if device is not None and device.type == "cuda":
            self.seen.setdefault(device, {})
        current = [(torch.accelerator.current_stream(device), seen) for device, seen in list(self.seen.items())]
        for stream, seen in current:
            if stream not in seen:
                for other in tuple(seen):  # a forward in another thread may add its own
                    stream.wait_stream(other)
                seen[stream] = None
        yield
        for stream, seen in current:  # memory that the others allocated and that was read returns to them when freed
            for other in tuple(seen):
                if other != stream:
                    other.wait_stream(stream)

    def forget(self) -> None:
        """Ends a backward pass; the next one may be on the streams of the last forward."""
        self.seen = {device: {stream: None} for device, stream in self._used.items()}

    def __getstate__(self) -> dict[str, object]:
        return Streams().__dict__  # a copy of the model has run on no stream
