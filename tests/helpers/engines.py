"""A stand-in for an inference engine: fused, padded and sharded weights with loaders of vLLM's sort, and its routes."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import transformers
from checkpoints import save
from torch import nn

from sparsify.delta.served import ServedModel
from sparsify.integrations.receiver import Receiver, Request

HIDDEN, HEADS, KEY_HEADS, INNER, VOCABULARY = 16, 4, 2, 24, 37


def llama(**options):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "attention_bias": True}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


class Engine(nn.Module):
    """The weights of :func:`llama` as one of ``ranks`` ranks keeps them: qkv and gate/up fused, the vocabulary padded."""

    def __init__(self, tensors, rank=0, ranks=1, dtype=torch.float32, transform=lambda name, weight: weight):
        super().__init__()
        self.rank, self.ranks, self.transform = rank, ranks, transform
        size, key, inner = HIDDEN // ranks, HIDDEN * KEY_HEADS // HEADS // ranks, INNER // ranks
        shapes = {"embed": (20 * 2 // ranks, HIDDEN), "head": (20 * 2 // ranks, HIDDEN), "norm": (HIDDEN,)}
        for layer in range(2):
            own = {"qkv": (size + 2 * key, HIDDEN), "qkv_bias": (size + 2 * key,), "o": (HIDDEN, size)}
            own |= {"gate_up": (2 * inner, HIDDEN), "down": (HIDDEN, inner), "o_bias": (HIDDEN,)}
            own |= {"norm1": (HIDDEN,), "norm2": (HIDDEN,)}
            shapes |= {f"{name}{layer}": shape for name, shape in own.items()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.offsets = {"q_proj": (0, size), "k_proj": (size, key), "v_proj": (size + key, key)}
        self.offsets |= {"gate_proj": (0, inner), "up_proj": (inner, inner)}
        self.load_weights(tensors.items())

    def load_weights(self, weights):
        for name, weight in weights:
            *_, module, kind = name.split(".")
            layer = name.split(".")[2] if ".layers." in name else ""
            weight = self.transform(name, weight)
            if module in ("embed_tokens", "lm_head"):
                target = getattr(self, "head" if module == "lm_head" else "embed").data
                rows = weight.narrow(0, self.rank * 20, min(20 * 2 // self.ranks, VOCABULARY - self.rank * 20))
                target[: len(rows)].copy_(rows)
                target[len(rows) :].fill_(0)
            elif module in self.offsets:
                part = "gate_up" if module in ("gate_proj", "up_proj") else "qkv"
                start, size = self.offsets[module]
                target = getattr(self, f"{part}{'_bias' if kind == 'bias' else ''}{layer}").data.narrow(0, start, size)
                target.copy_(weight.narrow(0, self.rank * size, size))
            elif module in ("o_proj", "down_proj") and kind == "weight":
                target = getattr(self, f"{module[0] if module == 'o_proj' else 'down'}{layer}").data
                target.copy_(weight.chunk(self.ranks, 1)[self.rank])
            else:
                names = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "o_proj": "o_bias"}
                getattr(self, f"{names.get(module, module)}{layer}").data.copy_(weight)


def start(folder, rank=0, ranks=1, base=None, **options):
    """An engine that has loaded a checkpoint, and its weights as a base for deltas."""
    base = base or llama()
    save(base, folder)
    engine = Engine(base.state_dict(), rank, ranks, **options)
    return engine, ServedModel(engine, str(folder), options.get("dtype", torch.float32), is_shard=ranks > 1)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.named_parameters()}


def same(engine, model, **options):
    """Whether an engine holds what it would have loaded of a model."""
    expected = Engine(copy.deepcopy(model).state_dict(), engine.rank, engine.ranks, engine.norm.dtype, **options)
    return all(tensor.equal(getattr(expected, name)) for name, tensor in engine.named_parameters())


class Server:
    """Answers vLLM's routes for weights, with an engine behind; ``with`` starts and stops it."""

    def __init__(self, served, port=0):
        self.receiver, self.active, self.label, self.calls, self.failures = Receiver(served), False, "default", [], []
        answer = dict.fromkeys(("do_POST", "do_GET"), lambda handler: self._answer(handler))
        handler = type("Handler", (BaseHTTPRequestHandler,), {**answer, "log_message": lambda *_: None})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def _answer(server, self):  # noqa: N805 - the handler's method
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        route = self.path.strip("/").partition("?")[0]
        server.calls.append(route)
        status, answer = 200, {}
        try:
            if server.failures and route == server.failures[0][0]:
                raise server.failures.pop(0)[1]
            answer = server._carry_out(route, body) or {}
        except ConnectionError:
            return self.connection.close()
        except Exception as error:  # as vLLM does
            text = f"Call to collective_rpc method failed: {error}"
            status, answer = 500, {"error": {"message": text, "type": "InternalServerError"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _carry_out(self, route, body):
        if route in ("start_weight_update", "finish_weight_update"):
            if self.active != (route == "finish_weight_update"):
                raise RuntimeError(f"{route} called twice")
            self.active = not self.active
            self.label = body.get("weight_version", self.label)
        elif route == "update_weights":
            try:
                self.receiver.receive(Request(**body["update_info"]))
            except BaseException:
                self.active = False
                raise
        elif route == "update_weight_version":
            self.label = body["new_version"]
        elif route == "weight_info":
            return {"weight_version": self.label}
        return None
