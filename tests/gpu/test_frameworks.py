"""PyTorch and CuPy: training goes on after a suspend, regions become arrays."""

import struct
import time

import pytest

from cuckpt import ProcessGroup, driver
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


LOADER_TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    data = TensorDataset(torch.randn(4096, 256), torch.randn(4096, 1))
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        loader = DataLoader(
            data, batch_size=64, num_workers=2,
            multiprocessing_context="fork" if epoch % 2 else None,
        )
        for inputs, wanted in loader:
            optimizer.zero_grad()
            found = model(inputs.cuda())
            loss = torch.nn.functional.mse_loss(found, wanted.cuda())
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.12g}", flush=True)
    print("end", flush=True)

main()
"""


def losses_of_tree(program, suspend_after=()):
    seen, reports = [], []
    while (line := program.answer(timeout_s=180)) != "end":
        seen.append(line)
        if len(seen) in suspend_after:
            group = ProcessGroup.from_tree(program.pid)
            reports.append(group.suspend())
            time.sleep(0.5)
            group.resume()
    return seen, reports


def test_training_with_loader_processes_goes_on_with_equal_losses_of_tree(
    spawn, monkeypatch
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    expected, _ = losses_of_tree(spawn("-c", LOADER_TRAINING))
    found, reports = losses_of_tree(
        spawn("-c", LOADER_TRAINING), suspend_after=(20, 80, 150)
    )
    assert len(expected) == 192
    assert found == expected
    for report in reports:
        assert len(report.outcomes) == 1
        assert "no CUDA state" in report.skipped.values()
