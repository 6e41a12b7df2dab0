"""Attacks on what reads delta files, built from the format's own grammar rather than from random bytes.

Each takes a valid file apart and changes its keys, encodings, counts, shapes, names,
draws or config to what is legal,
nearly legal or absurd, but for which the file is as it should be; the payload's hash is made to fit. So they get at
what lies behind the first checks. ``fuzz_targets.py`` sends them through the library.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import struct

from fuzz_format import Parts

INTEGERS = [0, 1, -1, 2, 3, 7, 2**16, 10**6, 10**9, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**308]
NUMBERS = [*INTEGERS, 10**309, 0.5, -0.0, 5e-324, 1e-300, 1e308, True, False, None, "3", [], {}, [3], "x" * 5000]
DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
DTYPES |= {"F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}
NAMES = [
    "__metadata__", "a", "a.values", "a.values.values", "classifier.weight", "classifier.weight.whole", "module.a",
    "_orig_mod.classifier.weight", "base_model.model.classifier.bias", "../../etc/passwd", "", ".", "..",
    "a..b", "x" * 1000,
    "x" * 1001, "вес.😀", "a\n", "a\x1b[2J", "\u202e", "\ud800", "lm_head.weight",
    "bert.embeddings.word_embeddings.weight",
    "bert.pooler.dense.weight", "bert.encoder.layer.0.output.dense.weight",
    "bert.encoder.layer.99.output.dense.weight",
    "bert.encoder.layer.0.attention.self.query.lora_A.default.weight", "[bold]", "%s{}", "0", "layer." + "9" * 500,
]  # fmt: skip
PATTERNS = [
    "(a+)+$", "([a-z.0-9_]+)+!", "(([a-z]+)*)*[0-9]x", r".*(\w+\.?)+\w+#", "(", "[", "(?P<a>", "*", "", "query",
    ".*query",
    ".*", "all-linear", "(?:.?){60}.{60}x", "a{1000000000}", "(a{1000}){1000}", "\\", "(?s:.)" * 2000,
    ["query"], ["("], [], {},
    [["query"]], [3], None, 3, ["query"] * 10_000, {"query": 1}, True, "query\n", "\ud7ff",
]  # fmt: skip
ARCHITECTURES = [
    "BertForSequenceClassification", "BertModel", "BertForMaskedLM", "BertForQuestionAnswering",
    "GPT2LMHeadModel", "pipeline",
    "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification", "PreTrainedModel",
    "AutoModel", "os", "__doc__",
    "BertConfig", "RobertaForSequenceClassification", "MixtralForCausalLM", "x" * 100_000, "é", "a b", "", None,
    3, [], {},
    "Trainer", "AutoModelForSequenceClassification", "BertPreTrainedModel", "__class__", "modeling_utils",
]  # fmt: skip
TEXTS = [
    "",
    "x",
    "\x1b[2J",
    "\u202e",
    "a\nb",
    "é" * 3000,
    "../..",
    "/etc/passwd",
    "~",
    "user/name",
    "a b/c",
    "http://x/y",
    "\0",
]


# Attacks: each changes a valid file taken apart


def some_shape(rng: random.Random) -> list:
    return rng.choice([
        [], [0], [1], [3], [16, 16], [3, 16], [0, 3], [10**6, 0], [10**9, 0], [0, 2**62], [2**31, 2**31],
        [2**62], [1] * 64,
        [1] * 65, [rng.choice(INTEGERS)], [rng.choice(NUMBERS), 3],
    ])  # fmt: skip


def some_record(rng: random.Random, parts: Parts) -> tuple[str, dict] | None:
    records = parts.document["tensors"]
    return rng.choice(list(records.items())) if records else None


def add_whole(rng: random.Random, parts: Parts, name: object, dtype: str, shape: list) -> None:
    """Puts in a tensor stored whole, with as many bytes as a small shape needs."""
    sizes = shape if all(type(size) is int and size >= 0 for size in shape) else [0]
    count = math.prod(sizes)
    data = rng.randbytes(count * DTYPES[dtype]) if count < 5000 else b""
    parts.document["whole"].append(name)
    parts.header[f"{name}.whole"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(parts.payload)] * 2}
    parts.header[f"{name}.whole"]["data_offsets"][1] += len(data)
    parts.payload += data


def attack_gaps(rng: random.Random, parts: Parts) -> None:
    """A stream of indices from the encoding's grammar: entries, escapes, and one thing that may be wrong."""
    if (found := some_record(rng, parts)) is None:
        return attack_wholes(rng, parts)
    name, record = found
    numel = rng.choice([record["count"], 1000, 2**17, 2**40, 2**63 - 1])
    positions = sorted(rng.sample(range(min(numel, 2**20)), min(numel, record["count"])))
    if rng.random() < 0.4:
        positions = [*positions[:-1], numel - rng.choice([0, 1, 1, 2])]
    dtype, code = rng.choice([("U16", "H"), ("U16", "H"), ("U32", "I"), ("U64", "Q")])
    stream, previous = [], -1
    for position in positions:
        gap = position - previous - 1
        escapes = min(max(gap, 0) // 65_535, 300)
        stream += [*[65_535] * escapes, gap % 65_535] if dtype == "U16" else [position]
        previous = position
    wrong = rng.randrange(6)
    if wrong == 0:
        stream.append(2 ** (8 * struct.calcsize(code)) - 1)
    elif wrong == 1:
        stream.insert(0, 2 ** (8 * struct.calcsize(code)) - 1)
    elif wrong == 2:
        rng.shuffle(stream)
    elif wrong == 3:
        stream += stream[-1:] * rng.choice([1, 65_536])
    numbers = [number % 2 ** (8 * struct.calcsize(code)) for number in stream]
    if rng.random() < 0.5:
        record["shape"] = [numel]
    parts.replace_tensor(f"{name}.indices", dtype, [len(numbers)], struct.pack(f"<{len(numbers)}{code}", *numbers))
    return None


def attack_records(rng: random.Random, parts: Parts) -> None:
    """Kinds, dtypes, counts, shapes, draws and quantizations that are each legal, or nearly, and may not fit."""
    if (found := some_record(rng, parts)) is None:
        return attack_wholes(rng, parts)
    name, record = found
    for _ in range(rng.choice([1, 1, 2, 3])):
        field, value = rng.choice([
            ("kind", rng.choice(["add", "replace", "ADD", None, 1])), ("dtype", rng.choice([*DTYPES, "f32", None])),
            ("count", rng.choice([0, record.get("count", 1), *NUMBERS])), ("shape", some_shape(rng)),
            ("base_sha256", rng.choice(["0" * 64, "F" * 64, "", None, 0])),
            ("quantization", rng.choice(["bitsandbytes nf4", "x (transposed)", "(transposed)", "é", "",
            "x" * 101, None, 1])),
            ("drawn", {"distribution": rng.choice(["constant", "uniform", "normal", "Uniform", None, []]),
                       "scale": rng.choice(NUMBERS), "seed": rng.choice(NUMBERS)}),
        ])  # fmt: skip
        record[field] = value
    if rng.random() < 0.4:
        dtype = rng.choice(list(DTYPES))
        count = record["count"] if type(record["count"]) is int and 0 <= record["count"] < 5000 else 3
        parts.replace_tensor(f"{name}.values", dtype, [count], rng.randbytes(DTYPES[dtype] * count))
    if rng.random() < 0.2:
        parts.replace_tensor(f"{name}.values", "F32", [0], b"")
        parts.replace_tensor(f"{name}.indices", "U16", [0], b"")
        record["count"] = 0
    return None


def attack_names(rng: random.Random, parts: Parts) -> None:
    """Other names for tensors, in the metadata and in the keys; now and then one that is there already."""
    new = rng.choice([*NAMES, *parts.document["whole"], *parts.document["tensors"]])
    if parts.document["tensors"] and rng.random() < 0.5:
        old, record = some_record(rng, parts)
        del parts.document["tensors"][old]
        parts.document["tensors"][new] = record
        roles = ("indices", "values")
    elif parts.document["whole"]:
        old = parts.document["whole"].pop(rng.randrange(len(parts.document["whole"])))
        parts.document["whole"].append(new)
        roles = ("whole",)
    else:
        return
    for role in roles:
        parts.header[f"{new}.{role}"] = parts.header.pop(f"{old}.{role}")


def attack_wholes(rng: random.Random, parts: Parts) -> None:
    """More tensors stored whole, of any dtype and shape, under the base's names and others."""
    for name in rng.sample(NAMES, rng.choice([1, 1, 2])):
        add_whole(rng, parts, name, rng.choice(list(DTYPES)), some_shape(rng))


def attack_depth(rng: random.Random, parts: Parts) -> None:
    """A config at the limits of depth, of size, of numbers and of strings."""
    deep: object = rng.choice([3, "a", [], {}, None])
    for _ in range(rng.choice([60, 61, 62, 63, 64, 200, 900])):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    many = rng.choice([10, 1000, 20_000])
    parts.document["config"] = rng.choice([
        {"a": deep}, {"a": [[]] * many}, {"a": {str(i): {} for i in range(many)}}, {"x" * many * 50: 1},
        {"": "\ud800"},
        {"a": rng.choice([10**308, 10**309, -(10**309), 10**999, 10**1000, 5e-324, 1.7976931348623157e308])},
        {f"{i}\U0001f600": 0 for i in range(many)}, {"a": ["\U0001f600a"] * many}, {"a": "\0" * many},
        {"a:\"b": {"\\": "\":"}},
        {"versions": "\x1b[2J" * many}, {"strategy": deep, "budget": deep},
    ])  # fmt: skip


def attack_draws(rng: random.Random, parts: Parts) -> None:
    """Tensors to be drawn that are large, strange or not there; the digest can only be wrong where they are changed."""
    draw = {"distribution": rng.choice(["constant", "uniform", "normal"]), "scale": rng.choice([0, 1, 0.5,
    1e308, 5e-324]),
            "seed": rng.choice([0, 1, 2**63 - 1])}  # fmt: skip
    record = {"shape": some_shape(rng), "dtype": rng.choice(["F32", "F64", "BF16", "F16"]), "count": 0}
    name = rng.choice(NAMES)
    if name not in parts.document["tensors"]:
        parts.document["tensors"][name] = {**record, "base_sha256": "0" * 64, "drawn": draw}
        here = [len(parts.payload)] * 2
        parts.header[f"{name}.indices"] = {"dtype": "U16", "shape": [0], "data_offsets": here}
        parts.header[f"{name}.values"] = {"dtype": record["dtype"], "shape": [0], "data_offsets": here}


def attack_labels(rng: random.Random, parts: Parts) -> None:
    """A head's labels that no head, or an empty one, bears out."""
    names = [None, [], "x", {}, {"0": "a"}, {"0": "a", "1": "a", "2": "a"}, {"-1": "a", "x": 3, "²": "b"}]
    names += [{str(i): TEXTS[i % 13] for i in range(count)} for count in (2, 3, 1000)]
    head = {
        "num_labels": rng.choice(NUMBERS),
        "id2label": rng.choice(names),
        "problem_type": rng.choice([None, "x", 3, "regression"]),
    }
    parts.document["config"]["model_config"] = {key: value for key, value in head.items() if rng.random() < 0.8}
    if rng.random() < 0.6:
        size = rng.choice([head["num_labels"], 3, 10**6, 10**9])
        shape = rng.choice([[size, 0], [0, size], [size, 16], [size]]) if type(size) is int else [3]
        add_whole(rng, parts, rng.choice(["classifier.weight", "new.weight", "a"]), "F32", shape)


def attack_architecture(rng: random.Random, parts: Parts) -> None:
    parts.document["config"]["architecture"] = rng.choice(ARCHITECTURES)


def attack_base(rng: random.Random, parts: Parts) -> None:
    """What a config says of the base, the training and the versions."""
    key = rng.choice(["base_model_name_or_path", "base_model_revision", "base_dtypes", "versions", "strategy",
    "budget", "schedule",
                      "steps", "steps_done", "diff", "sum", "entries_in_whole", "model_config", "peft",
                      "adapters"])  # fmt: skip
    value = rng.choice(
        [*TEXTS, *NUMBERS, ["float8_e4m3fn"], ["Tensor", "float32"], [[]], {"a": {"b": [None]}}, [TEXTS]]
    )
    parts.document["config"][key] = value


def attack_peft(rng: random.Random, parts: Parts) -> None:
    """Fields of the recorded adapter's config: patterns, ranks and whatever else PEFT takes."""
    configs = parts.document["config"].setdefault(
        "peft", {"default": {"peft_type": "LORA", "target_modules": ["query"]}}
    )
    name = rng.choice(list(configs))
    settings = configs[name]
    for _ in range(rng.choice([1, 1, 2, 4])):
        key = rng.choice([*settings, "target_modules", "target_modules", "exclude_modules", "rank_pattern",
        "alpha_pattern", "r",
                          "layers_pattern", "layers_to_transform", "layer_replication", "target_parameters",
                          "modules_to_save"])  # fmt: skip
        value = rng.choice(
            [*PATTERNS, *PATTERNS, *NUMBERS, *TEXTS, [[0, 10**9]], "LOHA", "IA3", "LOKR", "PREFIX_TUNING", "olora"]
        )
        if key.endswith("_pattern") and rng.random() < 0.7:
            value = {pattern if isinstance(pattern, str) else "a": rng.choice(NUMBERS) for pattern in PATTERNS[:8]}
        settings[key] = value
    if rng.random() < 0.2:
        configs[rng.choice([*TEXTS, "default.x", "a" * 1000, "__class__"])] = copy.deepcopy(settings)


def attack_adapters(rng: random.Random, parts: Parts) -> None:
    """Settings of our own adapters."""
    valid = {"kind": "pfeiffer", "reduction_factor": 4, "name": "default", "target_modules": None}
    settings = parts.document["config"].setdefault("adapters", valid)
    key = rng.choice([*valid, "reduction_factor", "more"])
    settings[key] = rng.choice([*NUMBERS, *PATTERNS, *TEXTS, "houlsby"])
    if rng.random() < 0.1:
        del settings[rng.choice(list(settings))]


def attack_keys(rng: random.Random, parts: Parts) -> None:
    """Keys that the metadata does not imply, or that lack, and dtypes and shapes that the payload does not bear out."""
    key, action = rng.choice([key for key in parts.header if key != "__metadata__"]), rng.randrange(4)
    if action == 0:
        parts.header[rng.choice([*NAMES, f"{key}.values", key[:-1]])] = parts.header[key]
    elif action == 1:
        del parts.header[key]
    elif action == 2:
        parts.header[key][rng.choice(["dtype", "shape"])] = rng.choice([*DTYPES, some_shape(rng), "F4", None])
    else:
        parts.header["__metadata__"][rng.choice(["format", "sparse_delta2", "", "\0"])] = rng.choice(TEXTS)


ATTACKS = [
    attack_gaps, attack_records, attack_names, attack_wholes, attack_depth, attack_draws, attack_labels,
    attack_architecture,
    attack_base, attack_peft, attack_adapters, attack_keys,
]  # fmt: skip


NEEDS = {attack_peft: b'\\"peft\\"', attack_adapters: b'\\"adapters\\"', attack_gaps: b".indices"}  # in the valid file


def attacked(number: int, seed: int, valid: list[bytes]) -> tuple[str, bytes]:
    """The kind and the bytes of one file; the same for the same number and seed."""
    rng = random.Random(f"{seed}/{number}")
    attack = ATTACKS[number % len(ATTACKS)]
    parts = Parts(rng.choice([data for data in valid if NEEDS.get(attack, b"") in data]))
    attack(rng, parts)
    if rng.random() < 0.2:
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # it may find nothing to change
            rng.choice(ATTACKS)(rng, parts)
    return attack.__name__.removeprefix("attack_"), parts.join()
