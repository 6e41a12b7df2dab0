"""Delta files built to attack: a valid file is taken apart, changed, and put together with a payload hash that fits.

Some attacks damage bytes or JSON; others use the format's grammar, and change it to values that are legal, nearly legal
or absurd, in a file that is otherwise valid, so that they get past the first checks.
"""

import contextlib
import copy
import hashlib
import json
import math
import random
import struct

from delta_bytes import join, split

INTEGERS = [0, 1, -1, 2, 3, 7, 2**16, 10**6, 10**9, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**308]
NUMBERS = [*INTEGERS, 10**309, 0.5, -0.0, 5e-324, 1e308, True, False, None, "3", [], {}, [3], "x" * 5000]
DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
DTYPES |= {"F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}
NAMES = """__metadata__ a a.values a.values.values classifier.weight classifier.weight.whole module.a . .. a..b [bold]
    _orig_mod.classifier.weight base_model.model.classifier.bias ../../etc/passwd вес.😀 lm_head.weight %s{} 0
    bert.embeddings.word_embeddings.weight bert.pooler.dense.weight bert.encoder.layer.0.output.dense.weight
    bert.encoder.layer.99.output.dense.weight bert.encoder.layer.0.attention.self.query.lora_A.default.weight""".split()  # noqa: SIM905
NAMES += ["", "x" * 1000, "x" * 1001, "a\n", "a\x1b[2J", "\u202e", "\ud800", "layer." + "9" * 500]
PATTERNS = r"""(a+)+$ ([a-z.0-9_]+)+! (([a-z]+)*)*[0-9]x .*(\w+\.?)+\w+# ( [ (?P<a> * query .*query .* all-linear
    (?:.?){60}.{60}x a{1000000000} (a{1000}){1000} \ """.split()  # noqa: SIM905
PATTERNS += ["", "(?s:.)" * 2000, ["query"], ["("], [], {}, [["query"]], [3], None, 3, ["query"] * 10_000, {"query": 1}]
ARCHITECTURES = """BertForSequenceClassification BertModel BertForMaskedLM BertForQuestionAnswering GPT2LMHeadModel
    pipeline T5ForConditionalGeneration ViTForImageClassification PreTrainedModel AutoModel os __doc__ BertConfig é
    RobertaForSequenceClassification MixtralForCausalLM __class__ modeling_utils Trainer""".split()  # noqa: SIM905
ARCHITECTURES += ["x" * 100_000, "a b", "", None, 3, [], {}]
TEXTS = ["", "x", "\x1b[2J", "\u202e", "a\nb", "é" * 3000, "../..", "/etc/passwd", "~", "user/name", "http://x/y", "\0"]
SHAPES = [[], [0], [1], [3], [16, 16], [3, 16], [0, 3], [10**6, 0], [10**9, 0], [0, 2**62], [2**31, 2**31], [1] * 64]
SHAPES += [[1] * 65, [0, 2**63], *([number] for number in INTEGERS), *([number, 3] for number in NUMBERS)]
HOSTILE = [*NUMBERS, *DTYPES, *TEXTS, "replace", "add", "uniform", "0" * 64, "G" * 64, "\ud800", "x" * 100_000]
HOSTILE += [[[]], [0], [1, 1], [2**62, 4], [0, 2**62, 2**62], [-2, -3], [True, 2], [1] * 65, [8, 0], [0, 2**64], "a"]
LABELS = [None, [], "x", {}, {"0": "a"}, {"0": "a", "1": "a", "2": "a"}, {"-1": "a", "x": 3, "²": "b"}]
LABELS += [{str(i): TEXTS[i % len(TEXTS)] for i in range(count)} for count in (2, 3, 1000)]
VALUES = {  # of some fields; others get any of ANYTHING
    "kind": ["add", "replace", "ADD", None, 1],
    "dtype": [*DTYPES, "f32", None],
    "count": [0, *NUMBERS],
    "shape": SHAPES,
    "base_sha256": ["0" * 64, "F" * 64, "", None, 0],
    "quantization": ["nf4", "x (transposed)", "é", "", "x" * 101, None, 1],
    "architecture": ARCHITECTURES,
    "num_labels": NUMBERS,
    "id2label": LABELS,
    "problem_type": [None, "x", 3, "regression"],
    "rank_pattern": [{pattern: number} for pattern in PATTERNS[:8] for number in NUMBERS],
}  # fmt: skip
ANYTHING = [*NUMBERS, *PATTERNS, *TEXTS, [[0, 10**9]], [[]], {"a": {"b": [None]}}, ["float8_e4m3fn"], "LOHA", "houlsby"]
RECORD_KEYS = ["kind", "dtype", "count", "shape", "base_sha256", "quantization"]
HEAD_KEYS = ["num_labels", "id2label", "problem_type"]
CONFIG_KEYS = """architecture base_model_name_or_path base_model_revision base_dtypes versions strategy budget schedule
    steps diff sum entries_in_whole model_config peft adapters""".split()  # noqa: SIM905
PEFT_KEYS = """target_modules exclude_modules rank_pattern r layers_pattern layers_to_transform layer_replication
    target_parameters modules_to_save peft_type""".split()  # noqa: SIM905


class Parts:
    def __init__(self, data):
        self.data, (self.header, self.payload) = data, split(data)
        self.document = json.loads(self.header["__metadata__"]["sparse_delta"])
        self.stated = self.document["payload_sha256"]

    @property
    def keys(self):
        return [key for key in self.header if key != "__metadata__"]

    def join(self, rehash=True):
        if rehash and self.document.get("payload_sha256") == self.stated:
            self.document["payload_sha256"] = hashlib.sha256(self.payload).hexdigest()
        if isinstance(self.header.get("__metadata__"), dict):
            self.header["__metadata__"]["sparse_delta"] = json.dumps(self.document)
        return join(json.dumps(self.header).encode("utf-8", "surrogatepass"), self.payload)

    def replace_tensor(self, key, dtype, shape, data):
        """Puts other bytes in place of a tensor's; the others move, so that only this one is wrong."""
        begin, end = self.header[key]["data_offsets"]
        self.payload = self.payload[:begin] + data + self.payload[end:]
        for other in self.keys:
            low, high = self.header[other]["data_offsets"]
            if other != key and low >= end:
                moved = len(data) - (end - begin)
                self.header[other]["data_offsets"] = [low + moved, high + moved]
        self.header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(data)]}


def places(value, path=()):
    """The paths of everything in a JSON value, itself apart."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(*path, key), *places(item, (*path, key))]]


def holder_and_key(rng, root):
    *path, key = rng.choice(places(root))
    for step in path:
        root = root[step]
    return root, key


# Attacks that need no knowledge of the format; those that return bytes return the finished file


def attack_bytes(rng, parts, other):
    """Flipped, cut or appended bytes, or another length of the header."""
    data = parts.join()
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    more = rng.choice([b"\0", b"\0" * 4096, other.join(), rng.randbytes(rng.randrange(1, 64))])
    size = int.from_bytes(data[:8], "little")
    near = [0, 1, 2, size - 1, size + 1, size + 8, len(data), 2**25, 2**25 + 1, 2**31, 2**63, 2**64 - 1, 2**64 - 8]
    resized = struct.pack("<Q", rng.choice(near)) + data[8:]
    return rng.choice([bytes(changed), data[: rng.randrange(len(data))], data + more, resized])


def attack_json(rng, parts, other):
    parts.join()
    for _ in range(rng.choice([1, 1, 2, 3])):
        holder, key = holder_and_key(rng, rng.choice([parts.document, parts.header]))
        action = rng.randrange(6)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[str(rng.choice(HOSTILE))] = holder.pop(key)
        elif action == 2 and isinstance(holder, list):
            holder.append(holder[key])
        elif action == 3 and isinstance(holder[key], int):
            holder[key] += rng.choice([-1, 1, 2, -2, 65_535, 2**32, -(2**40)])
        else:
            holder[key] = rng.choice(HOSTILE)


# Attacks by the format's grammar


def attack_indices(rng, parts, other):
    name, record = rng.choice([*parts.document["tensors"].items()])
    numel = rng.choice([record["count"], 1000, 2**17, 2**40, 2**63 - 1])
    positions = sorted(rng.sample(range(min(numel, 2**20)), min(numel, record["count"])))
    if rng.random() < 0.4:
        positions = [*positions[:-1], numel - rng.choice([0, 1, 1, 2])]
    dtype, code = rng.choice([("U16", "H"), ("U16", "H"), ("U32", "I"), ("U64", "Q"), ("I64", "Q")])
    stream, previous, top = [], -1, 2 ** (8 * struct.calcsize(code))
    for position in positions:
        gap = position - previous - 1
        escapes = min(max(gap, 0) // 65_535, 300)
        stream += [*[65_535] * escapes, gap % 65_535] if dtype == "U16" else [position]
        previous = position
    stream = rng.choice([
        stream, stream, [*stream, top - 1], [top - 1, *stream], rng.sample(stream, len(stream)),
        stream + stream[-1:] * rng.choice([1, 65_536]), [top - 1] * rng.choice([1000, 100_000]) + stream[-1:],
    ])  # fmt: skip
    if rng.random() < 0.5:
        record["shape"] = [numel]
    numbers = [number % top for number in stream]
    parts.replace_tensor(f"{name}.indices", dtype, [len(numbers)], struct.pack(f"<{len(numbers)}{code}", *numbers))


def attack_fields(rng, parts, other):
    """Values of a record's, the config's or an adapter's fields that are legal, or nearly, and may not fit."""
    config = parts.document["config"]
    groups = [(RECORD_KEYS, [*parts.document["tensors"].values()]), (CONFIG_KEYS, [config])]
    groups += [(PEFT_KEYS, [*config.get("peft", {}).values()]), (HEAD_KEYS, [config.get("model_config")])]
    groups += [([], [config.get("adapters")])]
    keys, holders = rng.choice([(keys, holders) for keys, holders in groups if any(holders)])
    holder = rng.choice(holders)
    for _ in range(rng.choice([1, 1, 2, 4])):
        key = rng.choice([*keys, *holder, "more"])
        holder[key] = copy.deepcopy(rng.choice(VALUES.get(key, ANYTHING)))


def attack_values(rng, parts, other):
    name, record = rng.choice([*parts.document["tensors"].items()])
    dtype, fill = rng.choice(list(DTYPES)), rng.choice([None, b"\xff", b"\x7f\x80", b"\x80\x7f", b"\x01\xfc", b"\x3f"])
    size = DTYPES[dtype] * min(record["count"], 5000)  # which may be attacked, too
    data = rng.randbytes(size) if fill is None else (fill * size)[:size]
    record["dtype"] = rng.choice([record["dtype"], dtype])
    parts.replace_tensor(f"{name}.values", dtype, [record["count"]], data)


def attack_names(rng, parts, other):
    tensors, whole = parts.document["tensors"], parts.document["whole"]
    new = rng.choice([*NAMES, *whole, *tensors])
    if tensors and (not whole or rng.random() < 0.5):
        old, record = rng.choice([*tensors.items()])
        del tensors[old]
        tensors[new], roles = record, ("indices", "values")
    else:
        old, roles = whole.pop(rng.randrange(len(whole))), ("whole",)
        whole.append(new)
    for role in roles:
        parts.header[f"{new}.{role}"] = parts.header.pop(f"{old}.{role}")


def attack_dense(rng, parts, other):
    for name in rng.sample(NAMES, rng.choice([1, 1, 2])):
        dtype, shape = rng.choice(list(DTYPES)), rng.choice([*SHAPES, [3, 16], [3]])
        sizes = shape if all(type(size) is int and size >= 0 for size in shape) else [0]
        count, begin = math.prod(sizes), len(parts.payload)
        data = rng.randbytes(count * DTYPES[dtype]) if count < 5000 else b""
        parts.document["whole"].append(name)
        parts.header[f"{name}.whole"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(data)]}
        parts.payload += data


ATTACKS = [attack_bytes, attack_json, attack_indices, attack_fields, attack_values, attack_names, attack_dense]
NEEDS_ENTRIES = (attack_indices, attack_values)


def attacked(number, seed, valid, kinds=ATTACKS):
    """The kind of an attack, which of the valid files it changes, and its bytes; the same for a number and a seed."""
    rng = random.Random(f"{seed}/{number}")
    attack = kinds[number % len(kinds)]
    chosen = rng.choice([i for i, data in enumerate(valid) if b".indices" in data or attack not in NEEDS_ENTRIES])
    parts, other, data = Parts(valid[chosen]), Parts(rng.choice(valid)), None
    with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # it may find nothing to change
        data = attack(rng, parts, other)
        if data is None and rng.random() < 0.2:
            data = rng.choice(ATTACKS)(rng, parts, other)
    return attack.__name__.removeprefix("attack_"), chosen, parts.join() if data is None else data
