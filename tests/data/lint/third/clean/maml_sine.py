# %% [markdown]
# Second-order meta-learning on sine regression (converted from a notebook)
# %%
import numpy as np
import torch
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(0)
rng = np.random.default_rng(0)

INNER_LR = 0.01
INNER_STEPS = 5
META_BATCH = 8
ITERS = 20000

# %%
def sample_task():
    amp, phase = rng.uniform(0.1, 5.0), rng.uniform(0, np.pi)

    def draw(k):
        x = torch.from_numpy(rng.uniform(-5, 5, (k, 1))).float()
        return x, amp * torch.sin(x + phase)

    return draw


net = torch.nn.Sequential(
    torch.nn.Linear(1, 40), torch.nn.ReLU(),
    torch.nn.Linear(40, 40), torch.nn.ReLU(),
    torch.nn.Linear(40, 1),
)
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.StepLR(meta_opt, step_size=5000, gamma=0.5)

# %%
def adapt(params, x, y, steps=INNER_STEPS, second_order=True):
    for _ in range(steps):
        loss = F.mse_loss(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=second_order)
        params = {k: p - INNER_LR * g for (k, p), g in zip(params.items(), grads)}
    return params


def evaluate(n=100):
    before, after = [], []
    for _ in range(n):
        task = sample_task()
        xs, ys = task(10)
        xq, yq = task(50)
        start = {k: p.detach().clone().requires_grad_(True) for k, p in net.named_parameters()}
        fast = adapt(start, xs, ys, second_order=False)
        with torch.no_grad():
            before.append(F.mse_loss(functional_call(net, start, (xq,)), yq).item())
            after.append(F.mse_loss(functional_call(net, fast, (xq,)), yq).item())
    return float(np.mean(before)), float(np.mean(after))


# %%
history = []
for it in range(ITERS):
    meta_opt.zero_grad()
    meta_loss = 0.0
    for _ in range(META_BATCH):
        task = sample_task()
        xs, ys = task(10)
        xq, yq = task(10)
        fast = adapt(dict(net.named_parameters()), xs, ys)
        meta_loss = meta_loss + F.mse_loss(functional_call(net, fast, (xq,)), yq)
    meta_loss = meta_loss / META_BATCH
    meta_loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    meta_opt.step()
    sched.step()
    history.append(meta_loss.item())
    if it % 500 == 0:
        b, a = evaluate()
        print(f"{it:6d} meta {np.mean(history[-100:]):.4f} before {b:.3f} after {a:.3f}")

# %%
torch.save({"net": net.state_dict(), "history": history}, "maml.pt")
