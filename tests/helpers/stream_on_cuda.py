"""Publishes a small BERT in training on a CUDA device to a follower on it, and prints a line of JSON for each strategy.

    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python tests/helpers/stream_on_cuda.py simulated
    python tests/helpers/stream_on_cuda.py real

Devices are simulated as in ``train_on_cuda.py``, which this is modelled on. All work is on a side stream.
"""

import copy
import json
import os
import sys
import traceback
import warnings
from collections import Counter

import torch
from deltas import bits
from models import loss_of
from streams import STEPS, Run
from train_on_cuda import PLACES, REAL, SIMULATED, NotCounted

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta


def run(strategy, place, counted):
    """Whether a follower had each version, and of the last one what the host waited for, by call."""
    run = Run("bert", strategy=strategy, dtype=torch.bfloat16, modules_to_save=["classifier"])
    base = place.put(copy.deepcopy(run.base))
    model, batches = place.put(run.model), [place.batch(batch) for batch in run.batches]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], run.lr, weight_decay=0.0)
    equal, races = [], Counter()
    with place.current():
        publisher, follower = DeltaPublisher(model), DeltaSubscriber(base)
        follower.apply(publisher.snapshot())
        for step in range(STEPS + 1):  # nothing is unmasked in the last one
            seen = {call: counted() for call in ("step", "update", "bytes", "apply", "read")}
            with seen["step"]:
                loss_of(model, batches[step]).backward()
                optimizer.step()
                optimizer.zero_grad()
            with seen["update"]:
                update = publisher.update()
            with seen["bytes"]:
                message = bytes(update)
            with seen["apply"]:
                follower.apply(message)
            with seen["read"], follower.reading(), torch.no_grad():
                loss_of(follower.model, batches[step])
            races += sum((each.races for each in seen.values()), Counter())
            expected = SparseDelta.from_model(model).apply(copy.deepcopy(run.base))
            equal.append(bits(follower.model) == bits(expected))
    waits = {call: sum(seen[call].waits.values()) for call in ("update", "bytes", "apply")}
    return {"equal": equal, "races": races, "waits": waits}


def main(device):
    warnings.filterwarnings("ignore")
    counted = NotCounted
    if device == SIMULATED:
        import fake_cuda

        fake_cuda.install()
        counted = fake_cuda.Counted
    for strategy in ("id3", "pafi"):  # entries are added at each step; at none
        print(json.dumps(run(strategy, PLACES["side"], counted)), flush=True)


if __name__ == "__main__":
    try:
        main({SIMULATED: SIMULATED, REAL: REAL}[sys.argv[1]])
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # autograd's threads for the fake devices cannot be joined
