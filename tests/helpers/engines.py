"""A stand-in for an inference engine: fused, padded and sharded weights with loaders of vLLM's sort, and its routes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import transformers
from checkpoints import save
from torch import nn

from sparsify.delta.served import ServedModel
from sparsify.integrations.receiver import Receiver, Request


def llama(**options):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


class Engine(nn.Module):
    """What one of ``ranks`` ranks keeps of :func:`llama`: qkv and gate/up are fused, and the vocabulary is padded."""

    def __init__(self, tensors, rank=0, ranks=1, dtype=torch.float32, transform=lambda weight: weight):
        super().__init__()
        self.rank, self.ranks, self.transform = rank, ranks, transform
        shapes = {"embed_tokens.weight": (40 // ranks, 16), "lm_head.weight": (40 // ranks, 16), "norm.weight": (16,)}
        for layer in "01":
            own = {"qkv.weight": (32 // ranks, 16), "qkv.bias": (32 // ranks,), "gate_up.weight": (48 // ranks, 16)}
            own |= {"o_proj.weight": (16, 16 // ranks), "o_proj.bias": (16,), "down_proj.weight": (16, 24 // ranks)}
            own |= {"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)}
            shapes |= {layer + name: shape for name, shape in own.items()}
        self.own = nn.ParameterDict({name.replace(".", "_"): torch.zeros(s, dtype=dtype) for name, s in shapes.items()})
        self.own.requires_grad_(False)
        self.load_weights(tensors.items())

    def load_weights(self, weights):
        fused = {"q_proj": ("qkv", 0, 16), "k_proj": ("qkv", 16, 8), "v_proj": ("qkv", 24, 8)}
        fused |= {"gate_proj": ("gate_up", 0, 24), "up_proj": ("gate_up", 24, 24)}
        for name, weight in weights:
            (*_, module, kind), weight = name.split("."), self.transform(weight)
            part, start, size = fused.get(module, (module, 0, 0))
            start, size = start // self.ranks, size // self.ranks
            target = self.own[f"{name.split('.')[2] if '.layers.' in name else ''}{part}_{kind}"].data
            if size:
                target.narrow(0, start, size).copy_(weight.narrow(0, self.rank * size, size))
            elif len(weight) == 37:
                rows = weight[self.rank * len(target) :][: len(target)]
                target[: len(rows)].copy_(rows)
                target[len(rows) :].fill_(0)
            else:
                target.copy_(weight.chunk(self.ranks, 1)[self.rank] if weight.dim() == 2 else weight)

    def bits(self):
        return {name: tensor.clone() for name, tensor in self.own.items()}

    def holds(self, expected):
        """Whether it has these bits, or those that it would have loaded of a model."""
        if isinstance(expected, nn.Module):
            expected = Engine(expected.state_dict(), self.rank, self.ranks, self.own.norm_weight.dtype).bits()
        return all(tensor.equal(expected[name]) for name, tensor in self.own.items())


def start(folder, rank=0, ranks=1, dtype=torch.float32):
    """An engine that has loaded a checkpoint, and its weights as a base for deltas."""
    engine = Engine(llama().state_dict(), rank, ranks, dtype)
    return engine, ServedModel(engine, str(save(llama(), folder)), dtype, is_shard=ranks > 1)


class Server:
    """Answers vLLM's routes for weights, with an engine behind; ``with`` starts and stops it."""

    def __init__(self, served, port=0):
        self.receiver, self.active, self.label, self.calls, self.lost = Receiver(served), False, "default", [], None
        answer = dict.fromkeys(("do_POST", "do_GET"), lambda handler: self.answer(handler))
        handler = type("Handler", (BaseHTTPRequestHandler,), {**answer, "log_message": lambda *_: None})
        self.http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or "{}")
        route = handler.path.strip("/").partition("?")[0]
        self.calls.append(route)
        status, answer = 200, {}
        try:
            answer = self.carry_out(route, body)
        except Exception as error:  # as vLLM does
            status, answer = 500, {"error": {"message": f"Call to collective_rpc method failed: {error}"}}
        if route == self.lost:
            self.lost = None
            return handler.connection.close()
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        return handler.wfile.write(data)

    def carry_out(self, route, body):
        if route in ("start_weight_update", "finish_weight_update"):
            assert self.active == (route == "finish_weight_update"), "called twice"
            self.active = not self.active
        elif route == "update_weights":
            self.active = False
            self.receiver.receive(Request(**body["update_info"]))
            self.active = True
        self.label = body.get("weight_version") or body.get("new_version") or self.label
        return {"weight_version": self.label}
