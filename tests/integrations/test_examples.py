"""Each example is what it says: guarded it ends well, unguarded it does not."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_watch(capsys: pytest.CaptureFixture[str]) -> None:
    main = example("watch").main
    assert main() < 0.2
    said = capsys.readouterr().out
    assert "step 60: skip-step" in said
    assert "step 120:" in said
    assert math.isnan(main(guarded=False, steps=70))


@pytest.mark.parametrize(("package", "name"), [("lightning", "lightning_fabric"), ("accelerate", "accelerate_loop")])
def test_loops(package: str, name: str) -> None:
    pytest.importorskip(package)
    main = example(name).main
    assert main() == (True, 1)
    assert main(guarded=False) == (False, 0)


@pytest.mark.parametrize(
    ("package", "name"), [("lightning", "lightning_trainer"), ("transformers", "transformers_trainer")]
)
def test_trainers(package: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    main = example(name).main
    finite, callback = main(tmp_path)
    assert finite
    assert callback.incidents
    assert not main(tmp_path, guarded=False)[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_policy_that_collapses(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    main = example("trl_grpo_collapse").main
    plain, _ = main(tmp_path / "plain", guarded=False)
    kept, did = main(tmp_path / "guarded")
    assert plain < 0.5 < kept
    assert any("rollback" in line for line in did)
