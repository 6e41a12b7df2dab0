"""Bytes and time of bringing a policy's new weights to the models that serve it: updates, diffs, and all weights.

    python examples/benchmarks/stream.py --rounds 7 --followers 1,4
    python examples/benchmarks/stream.py --rounds 7 --growing 12000
    python examples/benchmarks/stream.py --rounds 5 --shape llama-1b-quarter --followers 1,4,16

updates    ``DeltaPublisher.update()``, sent, and applied by ``DeltaSubscriber``
diffs      the trainer keeps a copy of all weights, compares, and sends int32 positions and values of what differs; the
           follower writes them. That is how vLLM's sparse transfer is fed, and the delta codecs of TRL, verl and slime
all        every weight, from the trainer's memory straight into the follower's

Trainer and followers are processes with a model each, and sockets between them (loopback). In every round the trained
entries get new values, all of which differ, and with ``--growing`` some more are unmasked, as in increment-S; then each
method in turn brings the same weights over. In the end every follower's weights are compared with the trainer's. "CPU"
are seconds of the trainer and of one follower together, which other processes on the machine change less.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from common import MB, build, check_names, report, run, write_json
from step_bench.models import LLAMA_1B, TINY
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsify import DeltaPublisher, DeltaSubscriber, get_engine, sparsify
from sparsify.common.raw_bits import digest

QUARTER = {"num_hidden_layers": 4}  # of 16
TINY_LLAMA = {**TINY, "num_key_value_heads": 2}
SHAPES = {
    "llama-1b": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_1B)),
    "llama-1b-quarter": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_1B | QUARTER)),
    "tiny": lambda: LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY_LLAMA.items() if "dropout" not in k})),
}
METHODS = ("updates", "diffs", "all")
PARTS = ("extract", "apply", "total", "cpu")  # seconds
_FRAME = struct.Struct("<8sQ")  # the method, and the number of bytes that follow
_DONE = struct.Struct("<dd")  # the follower's seconds to apply them, and of its CPU since the frame


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "llama-1b",
    density: Annotated[float, typer.Option(help="Share of all weights that are trained.")] = 0.001,
    growing: Annotated[int, typer.Option(help="Entries that are unmasked in each round.")] = 0,
    followers: Annotated[str, typer.Option(help="Numbers of followers, separated by commas.")] = "1",
    rounds: Annotated[int, typer.Option(help="Turns of each method, after one that is not counted.")] = 5,
    threads: Annotated[int, typer.Option(help="Of each process.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure updates of a stream beside diffs of snapshots and beside sending all weights."""
    check_names([shape], SHAPES, "shape")
    torch.set_num_threads(threads)
    numbers = [int(number) for number in followers.split(",")]
    results = [result for number in numbers for result in measure(shape, density, growing, number, rounds, threads)]
    entries = results[0]["entries"]
    report(
        f"{shape} in bfloat16, {entries:,} trained entries ({density:.2%}), of which {growing:,} are new in a round: "
        f"medians of {rounds} rounds in turns, {threads} thread(s) a process",
        ["method", "followers", "MB each", "bytes/entry", "extract (ms)", "apply (ms)", "all done (ms)", "CPU (ms)"],
        [
            (
                result["method"], result["followers"], f"{result['bytes'] / MB:,.2f}",
                f"{result['bytes'] / entries:,.3f}",
                *(f"{1000 * statistics.median(result[part]):,.1f}" for part in PARTS),
            )
            for result in results
        ],
    )  # fmt: skip
    write_json(json, results, shape=shape, density=density, growing=growing, rounds=rounds, threads=threads)


def measure(shape: str, density: float, growing: int, number: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Seconds of each method's parts, round by round, with a number of followers."""
    server = socket.create_server(("127.0.0.1", 0))
    context = get_context("fork")  # which has imported everything
    processes = [context.Process(target=follow, args=(shape, server.getsockname()[1], threads)) for _ in range(number)]
    for process in processes:
        process.start()
    model = build(SHAPES[shape], torch.bfloat16)
    budget = round(density * sum(parameter.numel() for parameter in model.parameters()))
    followers = [at_once(server.accept()[0]) for _ in processes]
    trainer = Trainer(sparsify(model, budget, "id3", steps=1), followers, later=growing * (rounds + 1))
    same = {"followers": number, "entries": budget}
    results: list[dict[str, Any]] = [{"method": name, **same, **{part: [] for part in PARTS}} for name in METHODS]
    for turn in range(rounds + 1):
        trainer.step(turn, growing)
        for result in results:
            taken = trainer.bring(result["method"])
            result["bytes"] = taken.pop("bytes")
            for part, seconds in taken.items() if turn else ():
                result[part].append(seconds)
    trainer.check()
    for process in processes:
        process.join()
    return results


class Trainer:
    """A sparsified model, and the sockets of its followers, which have its base; some entries are unmasked later."""

    def __init__(self, model: nn.Module, followers: list[socket.socket], later: int) -> None:
        self.model, self.followers = model, followers
        self.weights = weights_of(model)
        total, budget = sum(weight.numel() for weight in self.weights), model.sparse_values.numel()
        self.masked = torch.from_numpy(numpy.random.default_rng(0).choice(total, budget, replace=False))
        self.unmask(budget - later)
        self.publisher = DeltaPublisher(model)
        self.copy = [weight.clone() for weight in self.weights]
        self.senders = ThreadPoolExecutor(len(followers))
        self.send("updates", [memoryview(bytes(self.publisher.snapshot()))])
        self.makers: dict[str, Callable[[], list[memoryview]]] = {
            "updates": lambda: [memoryview(bytes(self.publisher.update()))],
            "diffs": lambda: diff(self.weights, self.copy),
            "all": lambda: [raw(weight) for weight in self.weights],
        }

    def unmask(self, number: int) -> None:
        """Unmasks some more of the random entries."""
        chosen, self.masked = self.masked.split([number, len(self.masked) - number])
        get_engine(self.model).start(chosen)

    @torch.no_grad()
    def step(self, seed: int, growing: int) -> None:
        """Unmasks some entries, and gives every trained one another value."""
        if growing:
            self.unmask(growing)
        torch.manual_seed(seed)
        engine = get_engine(self.model)
        engine.values[: engine.unmasked].normal_(std=0.05)
        engine.refresh()

    def bring(self, method: str) -> dict[str, Any]:
        """Brings the present weights to all followers by one method: seconds and bytes."""
        start, cpu = time.perf_counter(), time.process_time()
        parts = self.makers[method]()
        extracted = time.perf_counter()
        applied, follower_cpu = zip(*self.send(method, parts), strict=True)
        total, cpu = time.perf_counter() - start, time.process_time() - cpu
        seconds = extracted - start, statistics.median(applied), total, cpu + statistics.median(follower_cpu)
        return {**dict(zip(PARTS, seconds, strict=True)), "bytes": sum(part.nbytes for part in parts)}

    def send(self, method: str, parts: list[memoryview]) -> list[tuple[float, float]]:
        """Sends to all followers at a time; the seconds that each took to apply, and those of its CPU."""

        def send_to(follower: socket.socket) -> tuple[float, float]:
            follower.sendall(_FRAME.pack(method.encode(), sum(part.nbytes for part in parts)))
            for part in parts:
                follower.sendall(part)
            return _DONE.unpack(receive(follower, _DONE.size))

        return list(self.senders.map(send_to, self.followers))

    def check(self) -> None:
        """Raises unless every follower has these weights, and ends them."""
        own = "".join(map(digest, self.weights))
        for follower in self.followers:
            follower.sendall(_FRAME.pack(b"check", 0))
            if receive(follower, len(own)).tobytes().decode() != own:
                raise RuntimeError("a follower has other weights than the trainer")
        self.senders.shutdown()


def follow(shape: str, port: int, threads: int) -> None:
    """A follower's process: applies what comes, and answers with the seconds that it took."""
    torch.set_num_threads(threads)
    model = build(SHAPES[shape], torch.bfloat16)
    weights, subscriber = weights_of(model), DeltaSubscriber(model)
    trainer = at_once(socket.create_connection(("127.0.0.1", port)))
    while True:
        method, nbytes = _FRAME.unpack(receive(trainer, _FRAME.size))
        method = method.rstrip(b"\0").decode()
        if method == "check":
            trainer.sendall("".join(map(digest, weights)).encode())
            return
        start, cpu = time.perf_counter(), time.process_time()
        if method == "all":
            for weight in weights:
                receive(trainer, weight.nbytes, raw(weight))
        else:
            data = receive(trainer, nbytes)
            start = time.perf_counter()
            subscriber.apply(bytes(data)) if method == "updates" else write(weights, data)
        trainer.sendall(_DONE.pack(time.perf_counter() - start, time.process_time() - cpu))


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for name, parameter in model.named_parameters() if name != "sparse_values"]


def at_once(connection: socket.socket) -> socket.socket:
    """Has a connection send what it is given without waiting for more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def receive(connection: socket.socket, nbytes: int, into: memoryview | None = None) -> memoryview:
    view = memoryview(bytearray(nbytes)) if into is None else into
    done = 0
    while done < nbytes:
        got = connection.recv_into(view[done:])
        if not got:
            raise ConnectionError("the other end is gone")
        done += got
    return view


def diff(weights: list[Tensor], copy: list[Tensor]) -> list[memoryview]:
    """What differs from the copy, which is brought up to date: counts, int32 positions and values, weight by weight."""
    counts, parts = [], []
    for weight, before in zip(weights, copy, strict=True):
        changed = (weight.view(-1) != before.view(-1)).nonzero().squeeze(1)
        values = weight.view(-1)[changed]
        before.view(-1)[changed] = values
        counts.append(len(changed))
        parts += [changed.int(), values]
    return [raw(torch.tensor(counts)), *(raw(part) for part in parts if part.numel())]


def write(weights: list[Tensor], data: memoryview) -> None:
    """Writes what :func:`diff` made."""
    counts = torch.frombuffer(data, dtype=torch.int64, count=len(weights)).tolist()
    place = 8 * len(weights)
    for weight, count in zip(weights, counts, strict=True):
        if count:
            indices = torch.frombuffer(data, dtype=torch.int32, count=count, offset=place)
            values = torch.frombuffer(data, dtype=weight.dtype, count=count, offset=place + 4 * count)
            weight.view(-1).index_put_((indices.long(),), values)
            place += (4 + weight.itemsize) * count


if __name__ == "__main__":
    run(main)
