"""Readers share a lock, a writer has it alone, and a writer that waits comes before later readers."""

import threading
import time
from unittest.mock import Mock

import pytest
from streams import until

from sparsify.errors import SparsifyError
from sparsify.stream.subscriber import ReadWriteLock

SECONDS = 20


def started(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def taking(turn, order, name):
    """Starts a thread that appends a name when it has its turn."""

    def take():
        with turn():
            order.append(name)

    return started(take)


def test_a_waiting_writer_comes_before_later_readers():
    lock, order = ReadWriteLock(), []
    with lock.reading():
        writer = taking(lock.writing, order, "writer")
        until(lock._door.locked)
        reader = taking(lock.reading, order, "reader")
        time.sleep(0.02)
        assert order == []
        with lock.reading():  # a thread that reads already goes on
            order.append("nested")
    for thread in (writer, reader):
        thread.join(SECONDS)
    assert order == ["nested", "writer", "reader"]


def held(lock):
    with lock.reading():
        yield


def test_readings_of_one_thread_may_end_in_any_order():
    lock = ReadWriteLock()
    first, second = held(lock), held(lock)
    next(first), next(second)
    first.close()
    with pytest.raises(SparsifyError, match="would wait for itself"), lock.writing():
        pass
    second.close()
    with lock.writing():
        reader = started(lambda: next(held(lock)))
        time.sleep(0.02)
        assert reader.is_alive()
    reader.join(SECONDS)
    assert not reader.is_alive()


def test_interrupts_leave_nothing_locked_and_a_reading_may_end_in_another_thread(monkeypatch):
    lock, order = ReadWriteLock(), []
    for turn in (lock.reading, lock.writing):
        with pytest.raises(KeyboardInterrupt), turn():
            raise KeyboardInterrupt
    reading = held(lock)
    started(lambda: next(reading)).join(SECONDS)
    with monkeypatch.context() as patched:  # a writer that waits
        patched.setattr("sparsify.stream.subscriber.time.sleep", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), lock.writing():
            pass
    reading.close()
    taking(lock.reading, order, "reader").join(SECONDS)
    taking(lock.writing, order, "writer").join(SECONDS)
    assert order == ["reader", "writer"]
