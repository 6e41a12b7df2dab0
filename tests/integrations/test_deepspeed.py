"""DeepSpeed's ZeRO 1 and 2 on two ranks: by its engine and optimizers, resumed, under the Trainer; and no ZeRO 3."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import build
from rank_models import BUDGET, STEPS, error_of, own_part, words
from rank_processes import as_torchrun_does, on_ranks
from trainers import make_trainer, rows_of

from sparsify import SparseDelta, get_engine, optimizer_stepped, sparsify

PACKAGES = ["deepspeed==0.19.8", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo"]
CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}  # not its own 1.0
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2, "torch_adam": True}}
FOR_CPUS = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
RUNS = {
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "made by it": {"zero_optimization": {"stage": 2}, "optimizer": ADAMW},
    "for CPUs": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": FOR_CPUS},
}
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# the optimizer for CPUs is compiled at once and without optimizations, which takes half of the time
WHOLE = {"csrc/adam/cpu_adam.cpp', 'csrc/adam/cpu_adam_impl.cpp": "csrc/adam/whole.cpp", "'-O3', '-g'": "'-O0'"}

pytestmark = pytest.mark.slow


def entries_of(model):
    return get_engine(model).entries.ids.tolist(), model.sparse_values.detach().clone()


def in_one_process():
    model, batches = words(torch.float32)
    optimizer = torch.optim.AdamW([sparsify(model, BUDGET, "id3", steps=STEPS).sparse_values], lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return entries_of(model)


def by_its_engine(rank, name, folder):
    """A run, whose second half is made twice, by another engine the second time."""
    import deepspeed

    found = []
    for first in (0, STEPS // 2):
        model, batches = words(torch.float32)
        sparsify(model, BUDGET, "id3", steps=STEPS)
        config, parameters = CONFIG | RUNS[name], [model.sparse_values]
        own = {} if "optimizer" in config else {"optimizer": torch.optim.AdamW(parameters, lr=1e-2)}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, **own)
        kind = type(engine.optimizer.optimizer).__name__
        assert kind == ("DeepSpeedCPUAdam" if name == "for CPUs" else "AdamW")
        if first:
            engine.load_checkpoint(folder)
        for step, batch in enumerate(batches[first:], first):
            engine.backward(engine(**own_part(batch, rank)))
            engine.step()
            optimizer_stepped(model)
            if step + 1 == STEPS // 2:
                engine.save_checkpoint(folder)
        found.append((entries_of(model), SparseDelta.from_model(model).num_entries))
    return found


def by_the_trainer(rank, folder, ranks=2):
    model = sparsify(build("bert")[0], BUDGET, "id3")  # without dropout
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}} if ranks > 1 else None
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(
            model, folder, rows_of(), per_device_train_batch_size=4 // ranks, save_strategy="no", max_grad_norm=0.0,
            deepspeed=config,
        )  # fmt: skip
        trainer.train()
    return entries_of(model)


def partitioned():
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=CONFIG | {"zero_optimization": {"stage": 3}}):
        model = torch.nn.Linear(4, 4)
    return error_of(sparsify, model, 3)


def on_a_rank(rank, folder):
    as_torchrun_does(rank)
    names = [name for name in RUNS if COMPILER or name != "for CPUs"]
    runs = {name: by_its_engine(rank, name, folder / name) for name in names}
    return runs, by_the_trainer(rank, str(folder)), partitioned()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with DeepSpeed, for the ranks alone: libraries that find it import it."""
    folder = tmp_path_factory.mktemp("deepspeed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", folder]
    install = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
    if install.returncode:
        pytest.skip(f"pip cannot get {PACKAGES[0]}: {install.stderr.strip().splitlines()[-1]}")
    kernels = folder / "deepspeed" / "ops" / "op_builder" / "cpu" / "comm.py"  # it would compile them for a minute
    kernels.write_text(kernels.read_text().replace("super().is_compatible(verbose)", "False"))  # gloo sends instead
    return str(folder)


def compile_the_optimizer_for_cpus(package):
    ops = Path(package) / "deepspeed" / "ops"
    for builder in ("builder.py", "cpu_adam.py"):
        text = (file := ops / "op_builder" / "cpu" / builder).read_text()
        for slow, fast in WHOLE.items():
            text = text.replace(slow, fast)
        file.write_text(text)
    (ops / "csrc" / "adam" / "whole.cpp").write_text('#include "cpu_adam.cpp"\n#include "cpu_adam_impl.cpp"\n')
    load = "import sys; sys.path.insert(0, sys.argv[1])\nfrom deepspeed.ops.op_builder import CPUAdamBuilder as Builder"
    subprocess.run([sys.executable, "-c", f"{load}\nBuilder().load()", package], capture_output=True, check=True)


@pytest.fixture(scope="module")
def two(package, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(package)
        patched.setenv("PATH", os.path.join(package, "bin"), prepend=os.pathsep)  # with ninja
        patched.setenv("DS_ACCELERATOR", "cpu")
        patched.setenv("TORCH_EXTENSIONS_DIR", os.path.join(package, "compiled"))
        if COMPILER:  # here, as ranks would wait for each other for longer than they may
            compile_the_optimizer_for_cpus(package)
        # not forks of a process whose accelerate has found no DeepSpeed
        return on_ranks(2, on_a_rank, tmp_path_factory.mktemp("runs"), method="spawn")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process_and_goes_on_from_a_checkpoint(two, name):
    ids, values = in_one_process()
    for runs, *_ in two:
        if name not in runs:
            pytest.skip("there is no C++ compiler, with which DeepSpeed builds its optimizer for CPUs")
        whole, resumed = runs[name]
        assert (whole[0][0], whole[1]) == (ids, BUDGET)
        torch.testing.assert_close(whole[0][1], values, rtol=0, atol=1e-6 if name == "for CPUs" else 1e-7)
        assert resumed[0][0] == ids
        assert resumed[0][1].equal(whole[0][1])


def test_the_trainer_counts_its_steps(two, tmp_path):
    ids, values = by_the_trainer(0, str(tmp_path), ranks=1)
    for _, (own_ids, own_values), _ in two:
        assert set(own_ids) == set(ids)
        torch.testing.assert_close(own_values, values, rtol=1e-3, atol=1e-4)


def test_stage_3_is_refused_by_name(two):
    for *_, message in two:
        assert "`weight` is partitioned by DeepSpeed ZeRO stage 3; use stage 1 or 2, or FSDP2" in message


def test_the_example_trains_one_delta(package, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "a fine film", "label": label}) + "\n" for label in (0, 1) * 4))
    script = Path(__file__).parents[2] / "examples" / "zero.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += ["--train-file", str(rows), "--validation-file", str(rows), "--batch-size", "4", "--epochs", "2"]
    command += ["--budget", "200", "--out", str(tmp_path / "delta")]
    path = os.pathsep.join([package, *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["ranks"], result["entries"], result["steps"]) == (2, 200, 2)
    assert SparseDelta.load(tmp_path / "delta").num_entries == 200
