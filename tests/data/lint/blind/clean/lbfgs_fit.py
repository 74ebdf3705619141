import math

import torch
from torch import nn

torch.set_default_dtype(torch.float64)


def make_data(n=400):
    x = torch.linspace(-3, 3, n).unsqueeze(1)
    y = torch.sin(math.pi * x) * torch.exp(-0.1 * x ** 2) + 0.02 * torch.randn_like(x)
    perm = torch.randperm(n)
    tr, te = perm[: int(0.8 * n)], perm[int(0.8 * n):]
    return (x[tr], y[tr]), (x[te], y[te])


def main():
    torch.manual_seed(3)
    (x, y), (xt, yt) = make_data()
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    mse = nn.MSELoss()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=20, history_size=50,
                                  line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = mse(net(x), y)
        loss.backward()
        return loss

    for it in range(60):
        loss = optimizer.step(closure)
        if it % 10 == 0:
            with torch.no_grad():
                held_out = mse(net(xt), yt)
            print(f"{it:3d} fit {loss.item():.3e} held-out {held_out.item():.3e}")


if __name__ == "__main__":
    main()
