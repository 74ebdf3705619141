"""Each engine under a guard, against the real package on real processes (gloo). `make test-engines` runs all of them.

One process group serves all checks of one engine and number of ranks: processes are slow to start.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, torchrun

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

ALL = ("healthy", "nan", "poisoned", "rollback")
NO_POISON = ("healthy", "nan", "rollback")
"""For engines that skip or stop by themselves where the norm or the loss is not finite."""
DDP, FSDP2 = ("ddp", "ddp accumulate"), ("fsdp2", "fsdp2 accumulate")
ZERO = ("zero1", "zero2", "zero2 accumulate", "zero2 bf16", "zero3", "zero3 bf16")
STUDIES: list[tuple[str, str, int, tuple[str, ...], tuple[str, ...]]] = [
    ("accelerate", "accelerate", 2, (*DDP, *FSDP2), (*ALL, "replayed")),
    ("accelerate", "accelerate", 4, ("hsdp", "fsdp2 tp"), (*ALL, "replayed")),
    ("trainer", "transformers", 2, (*DDP, *FSDP2), ALL),
    ("trainer", "transformers", 2, FSDP2, ("replayed",)),
    ("lightning", "lightning", 2, (*DDP, *FSDP2), ALL),
    ("lightning", "lightning", 2, ("fabric ddp", "fabric fsdp2"), ALL),
    ("lightning", "lightning", 4, ("fsdp2",), ALL),
    ("deepspeed", "deepspeed", 2, ("zero0", "zero0 accumulate"), ALL),
    ("deepspeed", "deepspeed", 2, ZERO, NO_POISON),
    ("deepspeed", "deepspeed", 4, ("zero1", "zero3"), NO_POISON),
    ("torchtitan", "torchtitan", 2, ("fsdp2", "fsdp2 accumulate", "tp"), NO_POISON),
    ("torchtitan", "torchtitan", 2, ("pp", "pp interleaved", "pp accumulate"), NO_POISON),
    ("torchtitan", "torchtitan", 4, ("fsdp2", "fsdp2 tp", "hsdp"), NO_POISON),
    ("torchtitan", "torchtitan", 4, ("pp fsdp2",), NO_POISON),
]


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `make test-engines` makes an environment that has it")


@pytest.mark.parametrize(
    ("engine", "package", "ranks", "modes", "checks"), STUDIES, ids=[f"{s[0]}-{s[2]}-{s[3][0]}" for s in STUDIES]
)
def test_an_engine(
    engine: str, package: str, ranks: int, modes: tuple[str, ...], checks: tuple[str, ...], tmp_path: Path
) -> None:
    needs(package)
    script = str(HERE / f"{engine}_engine.py")
    said = torchrun(script, ",".join(modes), ",".join(checks), ranks=ranks, folder=tmp_path, timeout=560)
    done = [line for line in said.splitlines() if line.endswith(": ok")]
    assert done == [f"{mode}: {check}: ok" for mode in modes for check in checks]


def test_replicas_of_torchft_commit_no_nan(tmp_path: Path) -> None:
    needs("torchft")
    said = torchrun(str(HERE / "torchft_engine.py"), ranks=2, folder=tmp_path, timeout=240)
    assert [line for line in said.splitlines() if line.endswith(": ok")] == [
        f"replicas: {check}: ok" for check in ("healthy", "poisoned", "nan")
    ]


@pytest.mark.parametrize(
    ("package", "name", "told"),
    [
        ("deepspeed", "deepspeed_zero", "skipped [20]: 59 updates"),
        ("transformers", "trainer_fsdp2", "weights finite: True"),
        ("ray", "ray_train", "skipped [20]; loss"),
    ],
)
def test_an_example(package: str, name: str, told: str, tmp_path: Path) -> None:
    needs(package)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert told in done.stdout


def test_the_example_of_torchtitan(tmp_path: Path) -> None:
    needs("torchtitan")
    example = str(ROOT / "examples" / "torchtitan_llama.py")
    said = torchrun(str(HERE / "with_shim.py"), example, ranks=2, folder=tmp_path, timeout=240)
    assert "step 11: the loss is NaN on rank 1" in said
    assert "weights finite after 30 steps: True" in said
