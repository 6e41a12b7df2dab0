"""The order of a device's streams, with streams that record which others they have waited for."""

import copy

import pytest
import torch

from sparsify.common.streams import Streams

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, stream):
        self.waited_for.append(stream)


@pytest.fixture
def current(monkeypatch):
    """Each device's current stream; to be changed."""
    streams = {DEVICE: Stream(), OTHER: Stream()}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams[device])
    return streams


def join(streams, device=DEVICE):
    with streams.joined(device):
        pass


def test_a_stream_of_the_forward_is_waited_for_by_another_devices_thread(current):
    streams, forward, threads_own = Streams(), current[DEVICE], Stream()
    streams.use(DEVICE)
    current[DEVICE] = threads_own
    join(streams, OTHER)
    assert threads_own.waited_for == [forward]
    assert not current[OTHER].waited_for


def test_after_a_pass_only_the_last_forwards_stream_is_waited_for(current):
    streams, forward = Streams(), current[DEVICE]
    streams.use(DEVICE)
    current[DEVICE] = Stream()
    join(streams)
    streams.forget()
    current[DEVICE] = third = Stream()
    join(streams)
    assert third.waited_for == [forward]


def test_a_copy_was_on_no_stream(current):
    streams = Streams()
    join(streams)
    current[DEVICE] = second = Stream()
    join(copy.deepcopy(streams))
    assert not second.waited_for
