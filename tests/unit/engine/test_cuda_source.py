"""The source of CUDA events, attached through the real virtual method to an allocator that has no CUDA behind it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchmem.engine import native

FAKE = Path(__file__).resolve().parents[2] / "fake_cuda" / "fake_allocator.cpp"

PROGRAM = """
import ctypes, json, sys
import torch
fake = ctypes.CDLL(sys.argv[1])
fake.fake_event.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_ulonglong]
fake.fake_register()
from torchmem.engine import native
engine = native.load()
engine.reset([0, 0])
engine.set_gate(True)
said = [engine.attach_cuda()]
fake.fake_initialize(1)
fake.fake_refuse(1)
said.append(engine.attach_cuda())
fake.fake_refuse(0)
said += [engine.attach_cuda(), engine.attach_cuda()]
held = []
for event in json.loads(sys.argv[2]):
    fake.fake_event(*event)
    engine.end_step()
    held.append({device: num_bytes for device, num_bytes, *_ in engine.read_window()})
counters = engine.counters()
engine.set_gate(False)
fake.fake_event(0, 0, 4096, 10)
print(json.dumps({
    "said": said, "held": held, "trackers": fake.fake_num_trackers(), "ooms": counters["num_ooms"],
    "ooms_of": engine.ooms()[0], "events": [[*event[:9], list(event[9])] for event in engine.ooms()[1]],
    "unknown": counters["num_unknown_frees"], "later": engine.counters()["num_events"] - counters["num_events"],
}))
"""
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM = range(9)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The compiled stand-in."""
    library = tmp_path_factory.mktemp("fake") / "fake.so"
    torch_dir = Path(torch.__file__).parent
    stubs = native.SOURCE_DIR / "cuda_stub"
    flags = ["-std=c++17", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    include = [f"-I{stubs}", f"-I{torch_dir}/include", "-idirafter", str(stubs / "after")]
    command = [shutil.which("c++") or "g++", *flags, *include, str(FAKE), "-o", str(library)]
    subprocess.run([*command, f"-L{torch_dir}/lib", "-lc10"], check=True, timeout=100)
    return library


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a CUDA allocator of its own")
def test_the_allocators_trace_is_booked(fake):
    """Events of a CUDA device would not arrive, be booked as others, or a refusal of the allocator pass unnoticed."""
    events = [
        (SEGMENT_ALLOC, 0, 0x7F0000000000, 20 << 20),
        (ALLOC, 0, 0x7F0000000000, 1000),
        (ALLOC, 1, 0x7E0000000000, 300),
        (FREE_REQUESTED, 0, 0x7F0000000000, 1000),
        (FREE_COMPLETED, 0, 0x7F0000000000, 1000),
        (SEGMENT_MAP, 0, 0x7F0000000000, 2 << 20),
        (SEGMENT_UNMAP, 0, 0x7F0000000000, 2 << 20),
        (SNAPSHOT, 0, 0, 0),
        (OOM, 1, 1 << 30, 2 << 30),
        (SEGMENT_FREE, 0, 0x7F0000000000, 20 << 20),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(fake), json.dumps(events)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["said"][0] == "CUDA is not initialised yet"
    assert result["said"][1].startswith("the CUDA allocator takes no trace tracker: cudaMallocAsync")
    assert "frame #" not in result["said"][1]
    assert result["said"][2:] == ["", ""]
    assert result["trackers"] == 1
    on_first = [held.get("1", 0) for held in result["held"]]
    assert on_first == [0, 1000, 1000, 0, 0, 0, 0, 0, 0, 0]
    assert [held.get("2", 0) for held in result["held"]] == [0, 0, *[300] * 8]
    assert (result["ooms"], result["unknown"], result["later"]) == (1, 0, 0)
    assert result["ooms_of"] == [[2, 1]]
    [[number, device, owner, reftype, phase, steps, requested, held, _, cells]] = result["events"]
    assert (number, device, owner, reftype, phase, steps, requested, held) == (1, 2, 0, 0, 0, 8, 2 << 30, 300)
    assert bytes(cells) == struct.pack("<IIq", 0, 0, 300)
