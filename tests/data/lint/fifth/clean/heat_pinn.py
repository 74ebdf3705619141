"""Physics-informed network for u_t = k u_xx on [0,1]x[0,1]; Adam, then L-BFGS polishing."""
import math

import torch
from torch import nn

K = 0.05
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Field(nn.Module):
    def __init__(self, width=50, depth=4):
        super().__init__()
        dims = [2] + [width] * depth + [1]
        self.lin = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        for l in self.lin:
            nn.init.xavier_normal_(l.weight)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for l in self.lin[:-1]:
            h = torch.tanh(l(h))
        return self.lin[-1](h)


def residual(u_net, x, t):
    x = x.clone().requires_grad_(True)
    t = t.clone().requires_grad_(True)
    u = u_net(x, t)
    ones = torch.ones_like(u)
    u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
    return u_t - K * u_xx


def sample(n):
    return torch.rand(n, 1), torch.rand(n, 1)


def objective(net, pts):
    (xf, tf), x0, tb = pts
    pde = residual(net, xf, tf).pow(2).mean()
    ic = (net(x0, torch.zeros_like(x0)) - torch.sin(math.pi * x0)).pow(2).mean()
    left = net(torch.zeros_like(tb), tb).pow(2).mean()
    right = net(torch.ones_like(tb), tb).pow(2).mean()
    return pde + 10 * ic + left + right


def draw():
    return sample(4000), torch.rand(400, 1), torch.rand(400, 1)


def exact(x, t):
    return torch.exp(-K * math.pi ** 2 * t) * torch.sin(math.pi * x)


net = Field()
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
decay = torch.optim.lr_scheduler.ExponentialLR(adam, gamma=0.9995)
for it in range(5000):
    adam.zero_grad()
    loss = objective(net, draw())
    loss.backward()
    adam.step()
    decay.step()
    if it % 500 == 0:
        print("adam", it, float(loss))

pts = draw()
lbfgs = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=500, history_size=50, line_search_fn="strong_wolfe")


def closure():
    lbfgs.zero_grad()
    value = objective(net, pts)
    value.backward()
    return value


for outer in range(4):
    value = lbfgs.step(closure)
    print("lbfgs", outer, value.item())

with torch.no_grad():
    x, t = sample(20000)
    rel = (net(x, t) - exact(x, t)).norm() / exact(x, t).norm()
print(f"relative L2 error {rel.item():.3e}")
