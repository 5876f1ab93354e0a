"""PyTorch and CuPy: training goes on after a suspend, regions become arrays."""

import struct

import pytest

from cuckpt import driver
from cuckpt.structs import CheckpointCustomStoragePerDeviceData

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")

TRAINING = """
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data, wanted = torch.randn(4096, 512).cuda(), torch.randn(4096, 1).cuda()
for step in range(400):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(data), wanted)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.12g}", flush=True)
print("end", flush=True)
"""


def losses(target, suspend_after=()):
    """Read a training's losses, and suspend it in the middle of its work."""
    seen = []
    while (line := target.answer(timeout_s=180)) != "end":
        seen.append(line)
        if len(seen) in suspend_after:
            driver.checkpoint_process_lock(target.pid)
            driver.checkpoint_process_checkpoint(target.pid)
            driver.checkpoint_process_restore(target.pid)
            driver.checkpoint_process_unlock(target.pid)
    return seen


def test_training_continues_with_equal_losses(spawn, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    undisturbed = losses(spawn("-c", TRAINING))
    suspended = losses(spawn("-c", TRAINING), suspend_after=(20, 150))
    assert len(undisturbed) == 400
    assert suspended == undisturbed


@pytest.mark.parametrize("stream", ["none", "own"])
def test_region_becomes_an_array(stream):
    content = torch.arange(1000, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    handle = torch.cuda.Stream().cuda_stream if stream == "own" else 0
    region = CheckpointCustomStoragePerDeviceData.from_buffer(
        struct.pack("<QQQ", content.data_ptr(), content.numel(), handle)
    )
    assert torch.equal(torch.as_tensor(region, device="cuda"), content)
    assert cupy.asarray(region).get().tobytes() == content.cpu().numpy().tobytes()
    cupy.asarray(region)[:] = 7
    cupy.cuda.Device().synchronize()
    assert (content == 7).all()
