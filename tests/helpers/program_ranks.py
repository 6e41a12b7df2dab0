"""Random training programs on 2 x 2 ranks, each of which compares what it has with the oracle of all ranks' batches."""

from program_runs import Run, run
from programs import program
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

FULL = StateDictOptions(full_state_dict=True, strict=False)
SHARED = ColwiseParallel(output_layouts=Replicate())
# the layers of parts that are tensor-parallel; other parts are whole on each rank
PLANS = {
    "layers": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "twice": {"layer": SHARED},
    "tied": {"0": SHARED, "2": SHARED},
    "stacked": {"router": SHARED},
    "experts": {"router": SHARED, "experts.*": SHARED},
}


class HybridRun(Run):
    """Two copies of a model, each sharded over two ranks; all four ranks have batches of their own."""

    copies, is_sharded = 4, True

    def __init__(self, program):
        self.mesh = self.data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        self.copy_number = dist.get_rank() * self.copies // 4
        super().__init__(within_limits(program, type(self), self.is_sharded))

    def shard(self, model):
        if self.is_sharded:
            for part in dict.fromkeys(model.parts):
                fully_shard(part, mesh=self.data)
            fully_shard(model, mesh=self.data, ignored_params={model.sparse_values})
        return model

    def wrap(self, model):
        group = None if self.data is self.mesh else self.data.get_group()
        return model if self.is_sharded else DistributedDataParallel(model, process_group=group)

    def state(self):
        return get_model_state_dict(self.sparse, options=FULL)

    def load(self, model, state):
        names = dict([*model.named_parameters(), *model.named_buffers()])  # torch loads no second name of a module
        set_model_state_dict(model, {name: state[name] for name in names if name in state}, options=FULL)


class CopiesRun(HybridRun):
    """Four copies under DDP."""

    is_sharded = False


class ParallelRun(HybridRun):
    """Two copies of a model under DDP or FSDP2, each tensor-parallel over two ranks, which have the same batches."""

    copies = 2

    def __init__(self, program):
        self.is_sharded = program.seed % 4 > 1
        super().__init__(program)

    def split(self, model):
        self.data, plan = self.mesh["copies"], {}
        for number, (kind, part) in enumerate(zip(self.program.parts, model.parts, strict=True)):
            if part not in list(model.parts)[:number]:
                plan |= {f"parts.{number}.{name}": style for name, style in PLANS.get(kind, {}).items()}
        if self.program.head in ("own", "tied"):  # others read the table's weight
            plan |= {"table": RowwiseParallel(input_layouts=Replicate()), "head": SHARED}
        parallelize_module(model, self.mesh["parts"], plan)
        if self.program.head == "tied":
            model.head.weight = model.table.weight
        for kind, part in zip(self.program.parts, model.parts, strict=True):
            if kind == "tied":
                part[2].weight = part[0].weight
        return model


def within_limits(program, kind, is_sharded):
    """Leaves out what torch itself refuses there, as going on after a pass that failed.

    FSDP2 takes neither copies nor ``inference_mode()``; DDP takes one backward pass for each forward pass.
    """
    script = []
    for action, *arguments in program.script:
        if action == "backward" and arguments[0] != "summed" and not is_sharded:
            arguments[0] = "one"
        if action == "resume" and kind is ParallelRun and is_sharded:  # in shards of unequal sizes
            arguments = ["trained_state"]
        is_refused = is_sharded and (action == "copy" or arguments[:1] == ["inference"])
        if action != "fail" and arguments[:1] != ["pickle"] and not is_refused:
            script.append((action, *arguments))
    return program.but(script=script)


def run_all(rank, kind, seeds):
    for seed in seeds:
        run(program(seed), kind)
