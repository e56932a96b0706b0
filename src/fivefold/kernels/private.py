"""The undocumented parts of PyTorch that the kernels use. Each comment says what breaks without it;
tests/test_kernels.py calls every one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A tensor class without PyTorch's own overrides. Without it each use of a fake tensor is slower.
no_torch_function = torch._C._disabled_torch_function_impl


def wrapper(cls: type, like: Tensor, device: torch.device) -> Any:
    """A tensor of class `cls` that claims to be on `device`, and has the shape and dtype of `like` but no memory.
    Without it there are no fake tensors: traces would use FakeTensorMode, 10 times slower."""
    return Tensor._make_wrapper_subclass(
        cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=device
    )


def torch_fakes() -> bool:
    """True if FakeTensorMode is on. Without it DTensor cannot compute shapes while a step is traced."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def done_work(tensors: list[Tensor]) -> Any:
    """The handle of a finished collective, which keeps tensors until it is dropped. Without it collectives cannot be
    traced."""
    from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore[reportAttributeAccessIssue]

    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result(tensors)
    return _create_work_from_future(done).boxed()


def assert_on_device(holds: Tensor, otherwise: str) -> None:
    """Raises RuntimeError unless `holds` (bool scalar); on a GPU the kernel fails, and the host does not wait for it.
    Without it such a check stops the host until the GPU has caught up."""
    torch._assert_async(holds, otherwise)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias by oneDNN, without autograd. Without it fp32 on CPUs goes to MKL, slower on some."""
    bias = None if bias is None else bias.contiguous()  # the kernel ignores its stride
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of (B, H, T, d). Without it ring attention on GPUs takes the slow path: the documented
    function returns no log-sum-exp, and without that blocks cannot be merged."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def flash_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the output and log-sum-exp over all keys. Belongs to `flash_attention`."""
    no_dropout = torch.zeros((), dtype=torch.int64, device=k.device)  # a random state that nothing reads
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout
    )
