"""torchft on CPUs and gloo: two replicas in two processes and a lighthouse on the loopback. No shim.

Run by torchrun; each rank is a replica group of its own, so that there is no process group but torchft's.
"""

import math
import os
import sys
import warnings
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.optim import OptimizerWrapper

from steadystep.integrations.torchft import veto_non_finite
from tests.engines.study import BAD, STEPS, Plan, network, squared

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(store: TCPStore, name: str, plan: Plan) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """One run; weights and moments, vetoed steps and how many were committed."""
    if RANK == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=SIZE, join_timeout_ms=10_000)
        store.set(name, f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    address = store.get(name).decode()
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = network()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def load(state: dict[str, dict[str, torch.Tensor]]) -> None:
        net.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=SIZE,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"replica_{RANK}",
        store_addr="127.0.0.1",
        store_port=own.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        use_async_quorum=False,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
    )
    model, optimizer = DistributedDataParallel(manager, net), OptimizerWrapper(manager, adam)
    veto = veto_non_finite(manager, net.parameters()) if plan.guarded else None
    for step in plan.todo():
        optimizer.zero_grad()
        squared(model, plan.batch(step, RANK)).backward()
        optimizer.step()
    tensors = {key: value.clone() for key, value in net.state_dict().items()}
    for number, slots in adam.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value.clone() for key, value in slots.items()}
    committed = manager.current_step()
    if veto is not None:
        veto.remove()
        assert "should_commit" not in vars(manager)
    store.set(f"{name} {RANK}", "done")
    store.wait([f"{name} {rank}" for rank in range(SIZE)])
    manager.shutdown(wait=False)
    return tensors, [] if veto is None else veto.vetoed, committed


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    port = int(os.environ["MASTER_PORT"]) + 1
    store = TCPStore("127.0.0.1", port, SIZE, is_master=RANK == 0)
    plain, _, committed = train(store, "plain", Plan())
    assert committed == STEPS
    guarded, vetoed, committed = train(store, "guarded", Plan(guarded=True))
    assert equal(plain, guarded)
    assert (vetoed, committed) == ([], STEPS)
    say("replicas: healthy: ok")
    ruined, _, committed = train(store, "ruined", Plan(bad_rank=SIZE - 1))
    assert committed == STEPS
    assert any(not bool(value.isfinite().all()) for value in ruined.values())
    say("replicas: poisoned: ok")
    without, _, _ = train(store, "without", Plan(without=BAD))
    for bad in range(SIZE):
        ran, vetoed, committed = train(store, f"bad {bad}", Plan(guarded=True, bad_rank=bad))
        assert vetoed == [BAD]
        assert committed == STEPS - 1
        assert equal(without, ran), {n: float((v - ran[n]).abs().max()) for n, v in without.items()}
        assert all(math.isfinite(float(value.sum())) for value in ran.values())
    say("replicas: nan: ok")
    store.set(f"over {RANK}", "")
    if RANK == 0:  # the store ends with this process, and another may still be waiting for an answer
        store.wait([f"over {rank}" for rank in range(SIZE)])


def say(text: str) -> None:
    if RANK == 0:
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # why: the servers of torchft have threads that do not end
