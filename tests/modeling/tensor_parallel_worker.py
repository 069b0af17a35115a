"""What each process does in test_tensor_parallel.py: hold a model that is split over all of them to the
whole one. It writes what failed, by scenario and property, as JSON."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from communication import Call, backward, forward, sharded
from families import LANGUAGE_MODELS
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.distributed import DistributedConfig, consolidate_distributed_checkpoint

from hf_moa.modeling.cct.feed_forward import FeedForwardGate

CASES = {case.family.name: case for case in LANGUAGE_MODELS}


# names of operators, and where what is sent stands in their arguments
COLLECTIVES = {
    "all_reduce": ("all_reduce", 0),
    "allreduce_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_base_": ("all_to_all", 1),
}


class Sent(TorchDispatchMode):
    """Counts the real numbers that a process gives to collectives of each kind."""

    def __init__(self):
        super().__init__()
        self.numbers = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind, place = COLLECTIVES.get(func.__name__.split(".")[0], (None, 0))
        if kind is not None:
            tensor = args[place][0] if isinstance(args[place], list) else args[place]
            if tensor.is_floating_point():
                self.numbers[kind] += tensor.numel()
        return func(*args, **(kwargs or {}))

    def mean(self):
        """Over all processes."""
        found = {}
        for kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
            number = torch.tensor(float(self.numbers[kind]))
            dist.all_reduce(number)
            if number:
                found[kind] = number.item() / dist.get_world_size()
        return found


class Scenario:
    """The whole model and the split one, in float64; in float32 where experts are FSDP's, too: torch
    divides their float64 gradients twice."""

    def __init__(self, name: str, fields: dict, parallel: dict, folder: Path):
        self.parallel = parallel
        self.case = CASES[name.split("-")[0]]
        self.folder = folder / name
        fields = self.case.family.no_dropout | fields
        is_odd = parallel.get("ep_size", 1) > 1 and parallel.get("fsdp_size", 1) > 1
        self.dtype = torch.float32 if is_odd else torch.float64
        if dist.get_rank() == 0:
            self.case.build(**fields).save_pretrained(self.folder)
        dist.barrier()
        self.whole = self.load()
        self.split = self.load(distributed_config=DistributedConfig(**parallel))

    def load(self, **kwargs):
        return self.case.gated.from_pretrained(self.folder, dtype=self.dtype, **kwargs).eval()

    @property
    def budgets(self):
        config = self.whole.config
        budgets = config.cct_budgets or config.nested_budgets or [None]
        return [{"budget": tuple(b) if isinstance(b, list) else b} for b in (budgets[0], budgets[-1])]

    def outputs(self, **inputs):
        for model in (self.split, self.whole):
            torch.manual_seed(1)
            yield model(**self.inputs(), **inputs)

    def inputs(self):
        inputs = self.case.inputs()
        if getattr(self.whole.config, "add_cross_attention", False):
            shape = (len(inputs["input_ids"]), 5, self.whole.config.hidden_size)
            generator = torch.Generator().manual_seed(2)
            source = torch.randn(shape, generator=generator, dtype=torch.float64)
            inputs["encoder_hidden_states"] = source.to(self.dtype)
        return inputs

    def is_split(self) -> None:
        """Some parameters are, and no rank has much more than its share."""
        parts = [p for p in self.split.parameters() if isinstance(p, DTensor)]
        assert any(p.to_local().numel() < p.numel() for p in parts)
        whole = dict(self.whole.named_parameters())
        wrong = [n for n, p in self.split.named_parameters() if not torch.equal(full(p), whole[n])]
        assert not wrong, wrong

    def forward(self) -> None:
        for budget in self.budgets:
            with torch.no_grad():
                got, want = self.outputs(output_hidden_states=True, **budget)
            equal(got.logits, want.logits)
            hidden = "decoder_hidden_states" if self.case.family.name == "t5" else "hidden_states"
            for one, other in zip(got[hidden], want[hidden], strict=True):
                equal(one, other)

    def savings(self) -> None:
        """What a nested budget saves is shared by all processes."""
        if self.whole.config.nested_budgets is None or "tp_size" not in self.parallel:
            return
        saved = []
        for model in (self.split, self.whole):
            operations = []
            for budget in self.budgets:
                with torch.no_grad(), FlopCounterMode(display=False) as counter:
                    model(**self.inputs(), **budget)
                operations.append(counter.get_total_flops())
            saved.append(torch.tensor(operations[0] - operations[1]))
        dist.all_reduce(saved[0])
        assert saved[0] == saved[1]

    def sparse_forward(self) -> None:
        """In eval only some tokens, where gates skip some."""
        if self.whole.config.cct_budgets is None:
            return
        for model in (self.split, self.whole):
            model.set_cct_execution("sparse")
        self.forward()
        self.generation()
        if self.parallel.keys() == {"tp_size"} and not self.whole.config.cct_sublayer_norm:
            # what one process skips of the neurons, all skip together
            operations = [self.operations_of_neurons(model) for model in (self.split, self.whole)]
            dist.all_reduce(operations[0])
            assert operations[0] == operations[1]
        for model in (self.split, self.whole):
            model.set_cct_execution("auto")

    def operations_of_neurons(self, model) -> torch.Tensor:
        """Of the feed-forward layers without their gates, which all processes compute."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**self.inputs(), **self.budgets[-1])
        counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
        total, prefix = 0, type(model).__name__
        for name, module in model.named_modules():
            if isinstance(module, FeedForwardGate):
                layer = f"{prefix}.{name}".rpartition(".")[0]
                others = (f"{prefix}.{name}", f"{layer}.attention")  # BERT's layer has both
                total += counts[layer] - sum(counts.get(other, 0) for other in others)
        assert total > 0
        return torch.tensor(total)

    def gradients(self) -> None:
        for model in (self.split, self.whole):
            model.train()
        for budget in self.budgets:
            if self.parallel.keys() <= {"tp_size", "ep_size"}:  # all processes have one batch
                self.split.set_global_statistics(gate_norm=True, router_balance=True)
            got, want = self.outputs(**self.case.labels(), **budget)
            equal(got.loss, want.loss)
            for name in ("aux_loss", "task_loss"):
                if want.get(name) is not None:
                    equal(got[name], want[name])
            for output in (got, want):
                output.loss.backward()
            self.compare_gradients()
            for model in (self.split, self.whole):
                model.zero_grad()
            buffers = dict(self.whole.named_buffers())
            for name, buffer in self.split.named_buffers():
                equal(buffer, buffers[name], name)
        self.split.set_global_statistics(gate_norm=False, router_balance=False)
        for model in (self.split, self.whole):
            model.eval()

    def compare_gradients(self) -> None:
        whole = dict(self.whole.named_parameters())
        for name, parameter in self.split.named_parameters():
            found, expected = parameter.grad, whole[name].grad
            if expected is None:
                assert found is None, name
                continue
            assert found is not None, name
            equal(full(found), expected, name)

    def generation(self) -> None:
        if self.case.family.name == "bert" or "encoder_hidden_states" in self.inputs():
            return
        inputs = self.case.inputs()
        inputs.pop("decoder_input_ids", None)
        if self.case.family.name == "gpt2":  # padding on the left
            inputs = {name: x.flip(1) for name, x in inputs.items()}
        for how in ({}, {"num_beams": 2}, {"use_cache": False}):
            for budget in self.budgets:
                options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False} | how | budget
                got, want = (m.generate(**inputs, **options) for m in (self.split, self.whole))
                assert torch.equal(got, want), (how, budget)

    def communication(self) -> None:
        """As many numbers as examples/communication.py says."""
        is_other = "encoder_hidden_states" in self.inputs() or "relative" in self.folder.name
        sizes = {"tp_size": 1, "ep_size": 1} | self.parallel
        if is_other or (sizes["tp_size"] > 1 and "fsdp_size" in sizes) or "dp_replicate_size" in sizes:
            return
        inputs, call = self.case.inputs(), sizes | {"batch": 3, "length": 9}
        fsdp_size = call.pop("fsdp_size", 1)
        if self.case.family.name == "t5":
            call |= {"length": 6, "source_length": 9}
        call = Call(**call)
        self.split.train()
        for is_first in (True, False):
            with Sent() as of_forward:
                loss = self.split(**inputs, **self.case.labels(), **self.budgets[0]).loss
            with Sent() as of_backward:
                loss.backward()
            self.split.zero_grad()
            if is_first:  # FSDP may still have all of what is in no layer
                torch.optim.SGD(self.split.parameters(), lr=0.0).step()
        self.split.eval()
        config = self.whole.config
        expected = [forward(config, call), backward(config, call)]
        if fsdp_size == 1:
            assert [of_forward.mean(), of_backward.mean()] == [dict(sorted(c.items())) for c in expected]
            return
        in_layers, others = 0, 0
        for name, parameter in self.whole.named_parameters():
            if call.ep_size > 1 and ".experts." in name:
                continue  # no more than a process's
            parts = math.ceil(len(parameter) / fsdp_size) * fsdp_size  # of one size
            number = parameter.numel() // len(parameter) * parts
            if any(part.isdigit() for part in name.split(".")):
                in_layers += number
            else:
                others += number
        of_forward.numbers += of_backward.numbers
        expected = sum(expected, sharded(in_layers, others, fsdp_size))
        assert of_forward.mean() == dict(sorted(expected.items()))

    def training_step_and_saving(self) -> None:
        """Parameters behind an update, as files of the split model have them."""
        for model in (self.split, self.whole):
            model.train()
            torch.manual_seed(1)
            model(**self.inputs(), **self.case.labels()).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.eval()
        self.split.save_pretrained(self.folder / "split")
        dist.barrier()
        for model in (self.split, self.whole):
            model.zero_grad()
        saved = self.case.gated.from_pretrained(self.folder / "split", dtype=self.dtype)
        state = saved.state_dict()
        for name, tensor in self.whole.state_dict().items():
            equal(state[name], tensor, name)
        if dist.get_rank() == 0:
            self.whole.save_pretrained(self.folder / "whole")
            split, whole = (
                load_file(self.folder / kind / "model.safetensors") for kind in ("split", "whole")
            )
            assert split.keys() == whole.keys()
        self.forward()

    def draws(self) -> None:
        """Ranks with one head more, and neurons, draw alike after dropout on these."""
        if self.whole.config.nested_budgets is None or "tp_size" not in self.parallel:
            return
        rates = {m: m.p for m in self.split.modules() if isinstance(m, nn.Dropout)}
        for module in rates:
            module.p = 0.1
        self.split.train()
        for budget in self.budgets:
            self.split(**self.inputs(), **budget)
            states = [torch.get_rng_state() for _ in range(dist.get_world_size())]
            dist.all_gather(states, states[dist.get_rank()].clone())
            assert all(torch.equal(state, states[0]) for state in states)
        for module, rate in rates.items():
            module.p = rate
        self.split.eval()

    def sharded_checkpoint(self) -> None:
        """Files of the parts: they load split alike, and whole once they are put together. (safetensors
        writes none of tied weights; torch puts none together that hold integers, as MAE's gates do.)"""
        if self.whole.config.tie_word_embeddings:
            return
        parts, whole = self.folder / "parts", self.folder / "together"
        self.split.save_pretrained(parts, distributed_checkpoint=True)
        for form in (self.parallel, {"fsdp_size": dist.get_world_size()}):
            again = self.case.gated.from_pretrained(
                parts, dtype=self.dtype, distributed_config=DistributedConfig(**form)
            )
            others = dict(again.named_parameters())
            for name, parameter in self.split.named_parameters():
                assert torch.equal(full(others[name]), full(parameter)), (form, name)
        if not all(tensor.is_floating_point() for tensor in self.whole.state_dict().values()):
            return
        if dist.get_rank() == 0:
            consolidate_distributed_checkpoint(parts, whole)
            self.split.config.save_pretrained(whole)
        dist.barrier()
        together = self.case.gated.from_pretrained(whole, dtype=self.dtype).state_dict()
        for name, parameter in self.split.named_parameters():
            assert torch.equal(together[name], full(parameter)), name

    def experts_without_tokens(self) -> None:
        """All tokens go to the first experts; and there are fewer tokens than processes."""
        if self.whole.config.ffn_type != "moe":
            return
        for model in (self.split, self.whole):
            model.train()
            for name, parameter in model.named_parameters():
                if name.endswith("router.gate.weight"):
                    parameter.data.zero_()
        for size in (None, 1):
            inputs = {name: x[:size, :size] for name, x in self.case.inputs().items()}
            outputs = []
            for model in (self.split, self.whole):
                torch.manual_seed(1)
                outputs.append(model(**inputs))
            got, want = outputs
            equal(got.logits, want.logits)
            for output in outputs:
                (output.logits.square().mean() + output.aux_loss).backward()
            self.compare_gradients()
            for model in (self.split, self.whole):
                model.zero_grad()


PROPERTIES = (
    "is_split",
    "generation",  # first: sharded models prepare themselves in their first forward
    "forward",
    "savings",
    "sparse_forward",
    "gradients",
    "training_step_and_saving",
    "sharded_checkpoint",
    "draws",
    # last: they change the models
    "communication",
    "experts_without_tokens",
)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equal(got, want, message=None) -> None:
    tolerance = 1e-9 if want.dtype == torch.float64 else 1e-3
    named = None if message is None else lambda text: f"{message}: {text}"
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=named)


def main(folder: Path, scenarios: dict) -> None:
    failed = {}
    for name, (fields, parallel) in scenarios.items():
        failed[name] = {}
        try:
            scenario = Scenario(name, fields, parallel, folder)
        except Exception:
            failed[name]["loading"] = traceback.format_exc()
            continue
        for each in PROPERTIES:
            try:
                getattr(scenario, each)()
            except BaseException:  # as errors of checkpoints are
                failed[name][each] = traceback.format_exc()
    (folder / f"failed-{dist.get_rank()}.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    here = Path(sys.argv[1])
    main(here, json.loads((here / "scenarios.json").read_text()))
    dist.destroy_process_group()
