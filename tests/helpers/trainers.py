"""A real Hugging Face Trainer around a small model, a tokenizer for others, and the outcome of its runs to compare."""

import torch
from models import build
from oracle import unmasked_sets
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from sparsify import SparsifyCallback, get_engine, sparsify

BUDGET, STEPS = 60, 8
TRAINER = Trainer, TrainingArguments
BEST = {  # arguments by which the checkpoint of an early step is the best
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "greater_is_better": True,
}  # fmt: skip
WORDS = [first + second + third for first in "bdk" for second in "aeo" for third in "lmt"]
NUMBERS = ("loss", "grad_norm", "learning_rate", "unmasked")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **tokens)


def sentences(number, words, seed):
    generator = torch.Generator().manual_seed(seed)
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=generator)) for _ in range(number)]


def make_model(name="bert", steps=None, base=None, **options):
    """A sparsified model, of a checkpoint if there is one; with dropout, a run depends on the random generators."""
    model, _ = build(name)
    model = type(model).from_pretrained(base) if base else model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return sparsify(model, **{"budget": BUDGET, "strategy": "id3", "steps": steps, **options})


def rows_of(name="bert"):
    batches = build(name)[1]
    return [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(len(batch["labels"]))]


def make_trainer(model, folder, rows=None, callbacks=None, optimizers=(None, None), kind=TRAINER, **arguments):
    chosen = {
        "per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "seed": 3,
        "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
        **arguments,
    }  # fmt: skip
    rows = rows_of() if rows is None else rows
    options = {"train_dataset": rows, "eval_dataset": rows[:8] if kind is TRAINER else rows, "optimizers": optimizers}
    options["callbacks"] = [SparsifyCallback()] if callbacks is None else callbacks
    return kind[0](model, args=kind[1](str(folder), **chosen), **options)


def run_trainer(*args, resume=None, **options):
    trainer = make_trainer(*args, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def outcome(trainer):
    model = trainer.model
    logs = {log["step"]: [log.get(key) for key in NUMBERS] for log in trainer.state.log_history if "loss" in log}
    moments = trainer.optimizer.state_dict()["state"]
    return logs, unmasked_sets(model), dict(model.state_dict()), moments


def assert_same(one, other):
    assert one[:2] == other[:2]
    torch.testing.assert_close(one[2:], other[2:], rtol=0, atol=0)


def steps_done(model):
    engine = get_engine(model)
    return engine.step, engine.unmasked
