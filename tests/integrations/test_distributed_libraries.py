"""Several ranks through accelerate and the Hugging Face Trainer: DDP, and FSDP2 by accelerate's plugin."""

import os

import pytest
import torch
from models import build
from oracle import unmasked_sets
from rank_processes import on_ranks

from sparsify import SparseDelta, get_unmasker, sparsify, summary
from sparsify.common.ranks import num_ranks
from sparsify.integrations.distributed import check_ranks, keep_whole
from sparsify.integrations.transformers import SparsifyCallback

BUDGET, STEPS = 60, 6


def as_torchrun_does(rank):
    """The environment that says how many ranks there are; the process group is there already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks()))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29999", ACCELERATE_USE_CPU="true")


def rows_of(name):
    model, batches = build(name)
    return model, [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(4)]


def result_of(model):
    if num_ranks() > 1:
        check_ranks(model)
    return unmasked_sets(model), get_unmasker(model).values.detach().clone()


def by_the_trainer(rank, folder, resume=None):
    from transformers import Trainer, TrainingArguments

    model, rows = rows_of("bert")
    sparsify(model, BUDGET)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4 // num_ranks(), max_steps=STEPS, learning_rate=1e-2, save_steps=3,
        gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, weight_decay=0.0,
        max_grad_norm=0.0,  # the Trainer scales this model's loss by the number of ranks
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[SparsifyCallback()])
    trainer.train(resume_from_checkpoint=resume)
    return result_of(model)


def by_accelerate(rank):
    """FSDP2; accelerate would take it on GPUs only, so its state is told."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    model, rows = rows_of("llama")
    sparsify(model, BUDGET, steps=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        ignored_modules=keep_whole(model),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    plugin.set_mixed_precision("bf16")
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    names = set(accelerator.get_state_dict(model))
    entries = SparseDelta.from_model(model).num_entries
    return result_of(model), type(model).__name__, names, entries, summary(model, verify=True).verification.ok


def through_libraries(rank, folder):
    as_torchrun_does(rank)
    whole = by_the_trainer(rank, folder)
    resumed = by_the_trainer(rank, folder, resume=f"{folder}/checkpoint-3")
    return whole, resumed, by_accelerate(rank)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(2, through_libraries, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.slow
def test_two_ranks_of_the_trainer_are_one_with_twice_the_batch_and_resume_bit_for_bit(two, tmp_path):
    sets, delta = by_the_trainer(0, str(tmp_path))
    for whole, resumed, _ in two:
        assert whole[0] == sets
        torch.testing.assert_close(whole[1], delta, rtol=1e-3, atol=1e-4)
        assert resumed[0] == whole[0]
        assert torch.equal(resumed[1], whole[1])


@pytest.mark.slow
def test_fsdp2_by_accelerates_plugin_in_bfloat16(two):
    for _, _, (result, kind, names, entries, verified) in two:
        assert kind == "FSDPLlamaForCausalLM"
        assert sum(map(len, result[0].values())) == entries == BUDGET
        assert {"sparse_values", "lm_head.weight"} <= names
        assert verified
    assert torch.equal(two[0][2][0][1], two[1][2][0][1])
