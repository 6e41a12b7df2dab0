"""Random training programs on 2 x 2 ranks, each of which compares what it has with the oracle of all ranks' batches."""

from program_runs import Run, run
from programs import program
from rank_models import WAYS, selecting
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

FULL = StateDictOptions(full_state_dict=True, strict=False)
WHOLE = ColwiseParallel(output_layouts=Replicate())
PLANS = {  # of the layers of parts that are tensor-parallel
    "layers": {"0": ColwiseParallel(), "2": RowwiseParallel()}, "twice": {"layer": WHOLE},
    "tied": {"0": WHOLE, "2": WHOLE}, "stacked": {"router": WHOLE}, "experts": {"router": WHOLE, "experts.*": WHOLE},
}  # fmt: skip


class RanksRun(Run):
    """Two copies, each tensor-parallel over two ranks with the same batches, or four copies; under DDP or FSDP2."""

    def __init__(self, program, engine):
        self.engine = engine
        if "TP" in engine and program.head not in ("own", "tied") and not PLANS.keys() & set(program.parts):
            self.engine = "HSDP"  # nothing can be parallel
        self.copies, self.is_sharded = 2 if "TP" in self.engine else 4, "DDP" not in self.engine
        self.copy_number = dist.get_rank() * self.copies // 4
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        self.parts, self.data = mesh["parts"], mesh["copies"] if self.copies == 2 else mesh
        super().__init__(self.within_limits(program))

    def within_limits(self, program):
        """Leaves out what torch itself refuses there, as going on after a pass that failed.

        FSDP2 takes neither copies nor ``inference_mode()`` nor, over parallel ranks, states in uneven shards; DDP takes
        one backward pass for each forward pass.
        """
        script, refused = [], {"pickle", *(("deepcopy", "inference") if self.is_sharded else ())}
        for action, *arguments in program.script:
            if action == "backward" and arguments[0] != "summed" and not self.is_sharded:
                arguments[0] = "one"
            elif action == "resume" and self.is_sharded and self.copies == 2:
                arguments = ["trained_state"]
            if action != "fail" and refused.isdisjoint(arguments):
                script.append((action, *arguments))
        return program.but(script=script)

    def split(self, model):
        plan, program = {}, self.program
        for number, kind in enumerate(program.parts):
            plan |= {f"parts.{number}.{name}": style for name, style in PLANS.get(kind, {}).items()}
        if program.head in ("own", "tied"):  # others read the table's weight
            plan |= {"table": RowwiseParallel(input_layouts=Replicate()), "head": WHOLE}
        if self.copies == 2:
            parallelize_module(model, self.parts, plan)
            if program.head == "tied":
                model.head.weight = model.table.weight
            for kind, part in zip(program.parts, model.parts, strict=True):
                if kind == "tied":
                    part[2].weight = part[0].weight
        return model

    def shard(self, model):
        for part in dict.fromkeys(model.parts) if self.is_sharded else ():
            fully_shard(part, mesh=self.data)
        return fully_shard(model, mesh=self.data, ignored_params={model.sparse_values}) if self.is_sharded else model

    def wrap(self, model):
        group = self.data.get_group() if self.copies == 2 else None
        return model if self.is_sharded else DistributedDataParallel(model, process_group=group)

    def state(self, model):
        return get_model_state_dict(model, options=FULL)

    def load(self, model, state):
        names = dict([*model.named_parameters(), *model.named_buffers()])  # torch loads no second name of a module
        set_model_state_dict(model, {name: state[name] for name in names if name in state}, options=FULL)


def run_all(rank, engine, seeds):
    for seed in seeds:
        with selecting(WAYS[seed % 2]):
            run(program(seed), lambda program: RanksRun(program, engine))
