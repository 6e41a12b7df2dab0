"""Readers share a lock, a writer has it alone, and a writer that waits comes before later readers."""

import threading
import time

import pytest

from sparsify.common.turns import Turns
from sparsify.errors import SparsifyError

SECONDS = 20


def started(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.001)


def test_readers_share_it():
    turns, both = Turns(), threading.Barrier(2)

    def read():
        with turns.reading():
            both.wait(SECONDS)  # passes only if the other one is in at the same time

    threads = [started(read), started(read)]
    for thread in threads:
        thread.join(SECONDS)
    assert not both.broken


def test_a_waiting_writer_comes_before_later_readers():
    turns, order = Turns(), []

    def write():
        with turns.writing():
            order.append("writer")

    def read():
        with turns.reading():
            order.append("reader")

    with turns.reading():
        writer = started(write)
        until(lambda: turns._writers == 1)
        reader = started(read)
        time.sleep(0.02)
        assert order == []
        with turns.reading():  # a thread that reads already goes on
            order.append("nested")
    for thread in (writer, reader):
        thread.join(SECONDS)
    assert order == ["nested", "writer", "reader"]


def test_a_writer_in_a_reading_of_its_own_is_refused():
    turns = Turns()
    with turns.reading(), pytest.raises(SparsifyError, match="would wait for itself"), turns.writing():
        pass
    with turns.writing():  # nothing is left behind
        pass


def test_errors_end_a_turn():
    turns = Turns()
    for turn in (turns.reading, turns.writing):
        with pytest.raises(ZeroDivisionError), turn():
            raise ZeroDivisionError
    with turns.writing():
        pass


def test_what_is_written_is_never_seen_half():
    turns, pair, seen, stop = Turns(), [0, 0], [], threading.Event()

    def read():
        while not stop.is_set():
            with turns.reading():
                seen.append((pair[0], time.sleep(0), pair[1]))

    readers = [started(read) for _ in range(3)]
    for number in range(1, 200):
        with turns.writing():
            pair[0] = number
            time.sleep(0)
            pair[1] = number
    stop.set()
    for reader in readers:
        reader.join(SECONDS)
    assert seen
    assert all(first == second for first, _, second in seen)
