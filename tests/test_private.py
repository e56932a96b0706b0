"""PyTorch's private names are there, and do what `kernels/private.py` and `launch/private.py` assume."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import Launched
from ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.kernels import private
from fivefold.launch.private import abort_groups
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import UnitMessages
from fivefold.sharding.layout import Layout
from fivefold.sharding.units import FsdpUnit
from fivefold_plan.trace.fake import FakeMode


class Twice(nn.Module):
    """Two layers of 4 x 4, the second a unit within the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def unit(rank: int, world: int, masters: torch.dtype = torch.float32) -> tuple[Twice, list[FSDPModule]]:
    mesh = Mesh(Layout(dp_shard=world, zero=2), Ranks(rank, world, rank, world, torch.device("cpu")))
    torch.manual_seed(0)
    module, policy = Twice().to(masters), MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for part in (module.second, module):
        fully_shard(part, mesh=mesh.device_mesh("shard"), reshard_after_forward=False, mp_policy=policy)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        table = FsdpUnit(0, "unit", "shard", ("weight",), ((4 // world, 4),), 16, 16, ())
        UnitMessages(mesh, table, torch.float32).attach(part)
        assert [size for _, size in private.rows(part)] == [16 // world]
    assert isinstance(module, FSDPModule)
    assert isinstance(module.second, FSDPModule)
    return module, [module, module.second]


def whole_and_scattered(rank: int, world: int) -> None:
    module, units = unit(rank, world)
    assert [len(private.groups(part)) for part in units] == [1, 1]
    assert not any(tensor.untyped_storage().size() for part in units for tensor in private.gathered(part))
    private.gather_in_background(units[0])
    units[0].set_requires_gradient_sync(False)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for _ in range(2):
        module(x).sum().backward()
    gathered = [tensor for part in units for tensor in private.gathered(part)]
    assert [(t.numel(), t.dtype) for t in gathered] == [(16, torch.bfloat16)] * 2
    added = [gradient for part in units for gradient in private.whole_gradients(part)]
    assert [(tuple(g.shape), g.dtype) for g in added] == [((4, 4), torch.float32)] * 2
    added = [gradient.clone() for gradient in added]
    units[0].set_requires_gradient_sync(True)
    for part in reversed(units):
        private.take_deferred_gradients(part)
    private.end_backward(units[0])
    for part in units:
        part.reshard()
    for parameter, whole in zip((module.first.weight, module.second.weight), added, strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.to_local(), world * whole.chunk(world)[rank])
    private.forget_gradients(units[1])
    assert module.second.weight.grad is None
    assert module.first.weight.grad is not None


def divided_alone(rank: int, world: int) -> None:
    mesh = Mesh(Layout(dp_shard=world, zero=2), Ranks(rank, world, rank, world, torch.device("cpu")))
    with torch.device("meta"):
        module = Twice()
    fully_shard(module, mesh=mesh.device_mesh("shard"), ignored_params={module.first.weight})
    private.give_memory(module, torch.device("cpu"))
    assert [p.is_meta for p in module.parameters()] == [True, False]
    assert isinstance(module, FSDPModule)
    (group,) = private.groups(module)
    assert [p.sharded_param for p in group.fsdp_params] == [module.second.weight]


def one_memory(rank: int, world: int) -> None:
    module, units = unit(rank, world)
    first, second = module.first.weight, module.second.weight
    assert isinstance(first, DTensor)
    assert isinstance(second, DTensor)
    private.share_memory(units, second, first)
    with torch.no_grad():
        first.to_local().fill_(2.0)
    assert second.to_local().eq(2.0).all()
    units[1].unshard()
    assert module.second.weight.float().eq(2.0).all()


def rows_that_leave(rank: int, world: int) -> None:
    """Of a unit, while it does not gather its weights."""
    module, units = unit(rank, world)
    ((weight, size),) = private.rows(module)
    assert weight is module.first.weight
    flat = torch.zeros(size + 5)
    before = module.first.weight.to_local().detach().clone()
    private.place(module, [flat[2 : 2 + size]])
    assert torch.equal(flat[2 : 2 + size], before.view(-1))
    kept, seen = flat.clone(), list[bool]()

    def come(backward: bool) -> None:
        seen.append(backward)
        flat.untyped_storage().resize_(4 * (size + 5))
        flat.copy_(kept)

    private.around_gather(module, come, lambda: flat.untyped_storage().resize_(0))
    private.begin(units[0])
    flat.untyped_storage().resize_(0)
    units[0].set_reshard_after_forward(True)
    module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert seen == [False, True], "told which gather is for a backward"
    grad = module.first.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.to_local().shape == before.shape


def sums_in_fp32(rank: int, world: int) -> None:
    """Of rows in bf16, which holds no 1 + 2^-20."""
    module, units = unit(rank, world, torch.bfloat16)
    private.keep_sums(units, torch.float32)
    for part, x in ((units[0], 1.0), (units[0], 2.0**-20)):
        part.set_requires_gradient_sync(True)
        module(torch.full((1, 4), x, dtype=torch.bfloat16)).sum().backward()
    for layer in (module.first, module.second):
        grad = layer.weight.grad
        assert isinstance(grad, DTensor)
        found = grad.to_local()
        assert found.dtype == torch.float32
        assert torch.equal(found.bfloat16().float() * (1 + 2.0**-20), found), (
            "a sum of two that bf16 would cut off"
        )
        assert not torch.equal(found.bfloat16().float(), found)


def behind_its_backward(rank: int, world: int) -> None:
    """Deferred gradients are taken before a scatter is due. A module without a forward has none, and that is no
    error."""
    module, units = unit(rank, world)
    units[0].set_requires_gradient_sync(False)
    module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    for part in reversed(units):
        private.take_deferred_gradients(part)
    units[0].set_requires_gradient_sync(True)
    private.end_backward(units[0])
    assert all(isinstance(p.grad, DTensor) for p in module.parameters())
    idle, parts = unit(rank, world)
    private.end_backward(parts[0])
    assert all(p.grad is None for p in idle.parameters())


@pytest.mark.parametrize(
    "what",
    [whole_and_scattered, divided_alone, one_memory, rows_that_leave, sums_in_fp32, behind_its_backward],
)
def test_fsdp_does_what_is_assumed(what) -> None:
    run_ranks(2, what)


def test_storage() -> None:
    """Of views and detached tensors, fake ones, too."""
    with FakeMode():
        fake = [torch.empty(2, 3), torch.empty(2, 3)]
    for x, other in ((torch.ones(2, 3), torch.ones(2, 3)), fake):
        assert private.storage_of(x) == private.storage_of(x.detach().view(6))
        assert private.storage_of(x) != private.storage_of(other)


def test_in_backward() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[bool]()
    y = x * 2
    y.register_hook(lambda _: seen.append(private.in_backward()))
    assert not private.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not private.in_backward()


def test_after_backward() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[str]()
    y = x * 2
    y.register_hook(lambda _: private.after_backward(lambda: seen.append("end")))
    x.register_hook(lambda _: seen.append("last gradient"))
    y.sum().backward()
    assert seen == ["last gradient", "end"]


def test_watched() -> None:
    assert not private.watched()
    with FakeTensorMode():
        assert private.watched()


def aborted(folder: str) -> list[bool]:
    """One rank, with a message that ended, before and after."""
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
    before = dist.is_initialized()
    abort_groups()
    return [before, dist.is_initialized()]


def test_abort(tmp_path: Path) -> None:
    assert Launched(tmp_path / "log", aborted, str(tmp_path)).value() == [True, False]


def test_private_names_stand_in_one_file() -> None:
    """Elsewhere in parallel/ and comm/ no attribute of PyTorch's begins with an underscore."""
    src, found = Path(private.__file__).parents[1], []
    for file in [*src.glob("parallel/*.py"), *src.glob("comm/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and re.match("_[a-z]", node.attr)
                and file.name != "private.py"
            ):
                found.append(f"{file.name}: {ast.unparse(node)}")
    own = re.compile(
        r": (self\.|scores\._replace$|_Run\(|sys\._(getframe|current_frames)|os\._exit|torch\._foreach_)"
    )
    assert [name for name in found if not own.search(name)] == []
