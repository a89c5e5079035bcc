"""What the fake device has in common with a real one."""

import copy
import io
import threading

import pytest
import torch


def test_tensors_are_on_cuda():
    x = torch.randn(3, 4, device="cuda")
    assert x.is_cuda and str(x.device) == "cuda:0"
    assert (x @ x.T).is_cuda and x.view(2, 6).data_ptr() == x.data_ptr()
    torch.testing.assert_close((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    part = x[:, 1:3]
    part += 1
    assert torch.equal(x.cpu()[:, 1:3], part.cpu())
    x.resize_(2, 2)
    assert x.shape == (2, 2)


def test_new_memory_is_poisoned():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert bool(torch.empty(3, 2, dtype=dtype, device="cuda").isnan().all())


@pytest.mark.parametrize(
    "operation",
    [
        torch.add,
        torch.matmul,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.copy_(x + y),
        lambda x, y: torch.where(x > 0, x, y),
    ],
    ids=["add", "matmul", "cat", "in place", "where"],
)
def test_operands_on_different_devices_are_refused(operation):
    x, y = torch.randn(3, 3, device="cuda"), torch.randn(3, 3)
    operation(x, y.cuda())
    for operands in ((x, y), (y, x)):
        with pytest.raises(RuntimeError, match="same device"):
            operation(*operands)


def test_numbers_and_indices_may_lie_on_the_cpu():
    x = torch.randn(3, 3, device="cuda")
    assert (x * torch.tensor(2.0)).is_cuda
    assert x[torch.tensor([0, 2])].is_cuda


def test_backward_runs_in_the_device_s_own_thread():
    threads = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.append(threading.current_thread())
            return grad

    for device in ("cpu", "cuda"):
        Watch.apply(torch.randn(3, device=device, requires_grad=True)).sum().backward()
    assert threads[0] is threading.main_thread() is not threads[1]


def test_copies_and_files():
    layer = torch.nn.Linear(4, 2, device="cuda")
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")["weight"]
    assert loaded.device.type == "cpu" and torch.equal(loaded, layer.weight.cpu())
    pinned = torch.empty(3, pin_memory=True)
    assert pinned.device.type == "cpu"


def test_lstm():
    layer = torch.nn.LSTM(4, 3, batch_first=True)
    x = torch.randn(2, 5, 4)
    want = layer(x)[0]
    (grads,) = torch.autograd.grad(want.square().sum(), [layer.weight_hh_l0])
    layer.cuda()
    got = layer(x.cuda())[0]
    torch.testing.assert_close(got.cpu(), want)
    (on_device,) = torch.autograd.grad(got.square().sum(), [layer.weight_hh_l0])
    torch.testing.assert_close(on_device.cpu(), grads)
