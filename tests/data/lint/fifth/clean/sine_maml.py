"""Second-order meta-learning on sinusoid regression tasks."""
import math
from collections import OrderedDict

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


class Task:
    def __init__(self, rng):
        self.amp = 0.1 + 4.9 * torch.rand(1, generator=rng)
        self.phase = math.pi * torch.rand(1, generator=rng)
        self.rng = rng

    def draw(self, n):
        x = 10 * torch.rand(n, 1, generator=self.rng) - 5
        return x, self.amp * torch.sin(x + self.phase)


def base_net():
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def adapt(net, task, shots, inner_lr, steps, second_order=True):
    fast = OrderedDict(net.named_parameters())
    x, y = task.draw(shots)
    for _ in range(steps):
        loss = F.mse_loss(functional_call(net, fast, (x,)), y)
        grads = torch.autograd.grad(loss, list(fast.values()), create_graph=second_order)
        fast = OrderedDict((k, p - inner_lr * g) for (k, p), g in zip(fast.items(), grads))
    return fast


def post_loss(net, task, fast, n=15):
    x, y = task.draw(n)
    return F.mse_loss(functional_call(net, fast, (x,)), y)


def meta_test(net, rng, tasks=100, shots=10):
    scores = []
    for _ in range(tasks):
        task = Task(rng)
        fast = adapt(net, task, shots, 0.01, 10, second_order=False)
        with torch.no_grad():
            scores.append(post_loss(net, task, fast, 100).item())
    return sum(scores) / len(scores)


def main(iterations=20000, meta_batch=16):
    rng = torch.Generator().manual_seed(0)
    test_rng = torch.Generator().manual_seed(999)
    torch.manual_seed(0)
    net = base_net()
    outer = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(outer, 8000, gamma=0.3)
    for it in range(iterations):
        losses = []
        for _ in range(meta_batch):
            task = Task(rng)
            fast = adapt(net, task, shots=10, inner_lr=0.01, steps=1)
            losses.append(post_loss(net, task, fast))
        meta = torch.stack(losses).mean()
        outer.zero_grad()
        meta.backward()
        nn.utils.clip_grad_value_(net.parameters(), 10.0)
        outer.step()
        sched.step()
        if it % 1000 == 0:
            print(f"{it:6d} meta-train {meta.item():.3f} meta-test {meta_test(net, test_rng):.3f}")
    torch.save(net.state_dict(), "sine_maml.pt")


if __name__ == "__main__":
    main()
