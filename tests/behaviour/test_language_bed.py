"""The bed for language models, with a tiny random Gemma: what is selected, run, kept and compared."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from examples.paper import language, runs
from examples.paper.models import IGNORED
from examples.paper.rules import capped, floored, mixed, rates

BUDGET = 120
ROWS = [{"instruction": f"{n} of {n + 1}?", "output": f"The answer is {n % 7}.", "answer": ""} for n in range(40)]
METHODS = ["none", "lora-1", "random", "id3-early", "id3-uniform", "gradient", "column-3", "mixed-50", "scaled-50"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = Gemma3TextConfig(vocab_size=len(tokens), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                              num_attention_heads=2, num_key_value_heads=1, head_dim=8, bos_token_id=None,
                              eos_token_id=1, pad_token_id=0)  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder)
    (folder / "math").mkdir()
    for split in ("train_gsm8k", "gsm8k"):
        (folder / f"math/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_runs_are_kept_and_compared_by_row(gemma, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARSIFY_DATA", str(gemma))
    path = tmp_path / "runs.jsonl"
    options = f"--model {gemma} --results {path} --rates 1e-2 --budget {BUDGET} --steps 3 --held-out 4".split()
    for _ in range(2):
        language.main([*options, "--methods", *METHODS])
    assert (first := path.read_text()).count("\n") == len(METHODS)
    lines = {line["settings"]["method"]: line for line in runs.read(path).values()}
    assert list(lines) == METHODS
    assert all(len(line["rows"]) == 4 for line in lines.values())
    assert {lines[method]["trained"] for method in METHODS[2:]} == {BUDGET}
    assert len({line["loss"] for line in lines.values()}) == len(METHODS)
    assert str(gemma) not in first
    language.main([*options, "--candidates", "qv", "--methods", "lora", "random"])
    language.main(["--results", str(path), "--table"])
    assert "### tiny0, qv, 3 steps of 2 rows, 4 held-out rows" in capsys.readouterr().out


def test_the_loss_is_that_of_the_model_itself(gemma):
    model = Gemma3ForCausalLM.from_pretrained(gemma).eval()
    batch = {"input_ids": torch.randint(2, 200, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"].where(torch.arange(9) > torch.tensor([[3], [5]]), IGNORED)
    torch.testing.assert_close(language.answer_loss(model, batch), model(**batch).loss, rtol=5e-3, atol=0)  # bfloat16


def test_rules_keep_to_the_budget_their_caps_and_their_floor():
    torch.manual_seed(0)
    gradients = {"a": torch.randn(20, 30) * (1 + 20 * (torch.arange(30) == 3)), "b": torch.randn(30, 10)}
    masks = [
        {name: torch.zeros(g.numel()).index_fill(0, found[name], 1).view_as(g) for name, g in gradients.items()}
        for found in (capped(gradients, 90, 3, 4), floored(gradients, 90, 1), mixed(gradients, 90, 0.5, seed=0))
    ]
    assert [sum(int(mask.sum()) for mask in own.values()) for own in masks] == [90] * 3
    assert all(mask.sum(0).max() <= 3 and mask.sum(1).max() <= 4 for mask in masks[0].values())
    assert all(mask.sum(1).min() >= 1 for mask in masks[1].values())
    assert masks[2]["a"][:, 3].sum() > 15  # the outlier's column, by gradient
    assert float(rates(gradients, {"a": torch.tensor([0, 3])}, 1).diff()) < -1  # smaller in the outlier's column
    with pytest.raises(ValueError, match="loosen its cap"):
        capped(gradients, 90, column=1)
