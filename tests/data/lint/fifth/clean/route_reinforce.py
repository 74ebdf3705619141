"""Pointer network for small vehicle routes, REINFORCE with a greedy rollout baseline."""
import copy

import torch
import torch.nn as nn

DEV = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Router(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.emb = nn.Linear(2, d)
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 3)
        self.cell = nn.GRUCell(d, d)
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d)
        self.start = nn.Parameter(torch.zeros(d))

    def forward(self, xy, greedy=False):
        b, n, _ = xy.shape
        h = self.enc(self.emb(xy))
        keys = self.key(h)
        state, last = h.mean(1), self.start.expand(b, -1)
        mask = torch.zeros(b, n, dtype=torch.bool, device=xy.device)
        tour, logps = [], []
        for _ in range(n):
            state = self.cell(last, state)
            score = 10 * torch.tanh((keys @ self.query(state)[..., None]).squeeze(-1) / keys.size(-1) ** 0.5)
            logp = score.masked_fill(mask, float("-inf")).log_softmax(-1)
            nxt = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1).squeeze(-1)
            logps.append(logp.gather(1, nxt[:, None]).squeeze(1))
            tour.append(nxt)
            mask = mask.scatter(1, nxt[:, None], True)
            last = h[torch.arange(b, device=xy.device), nxt]
        return torch.stack(tour, 1), torch.stack(logps, 1).sum(1)


def length(xy, tour):
    p = xy.gather(1, tour[..., None].expand(-1, -1, 2))
    return (p - p.roll(-1, 1)).norm(dim=-1).sum(1)


@torch.no_grad()
def greedy_length(net, xy):
    mode = net.training
    net.eval()
    out = torch.cat([length(c, net(c, greedy=True)[0]) for c in xy.split(512)])
    net.train(mode)
    return out


class Baseline:
    def __init__(self, net, probe):
        self.net, self.probe = copy.deepcopy(net).eval(), probe
        self.mean = greedy_length(self.net, probe).mean()

    def challenge(self, net):
        cand = greedy_length(net, self.probe).mean()
        if cand < self.mean:
            self.net.load_state_dict(net.state_dict())
            self.mean = cand


def main(nodes=20, batch=512, epochs=50, per_epoch=500):
    torch.manual_seed(12)
    net = Router().to(DEV)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)
    base = Baseline(net, torch.rand(2048, nodes, 2, device=DEV))
    test = torch.rand(10_000, nodes, 2, device=DEV)
    for ep in range(epochs):
        net.train()
        costs = []
        for _ in range(per_epoch):
            xy = torch.rand(batch, nodes, 2, device=DEV)
            tour, logp = net(xy)
            cost = length(xy, tour)
            advantage = cost - greedy_length(base.net, xy)
            loss = (advantage * logp).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            costs.append(cost.mean())
        sched.step()
        base.challenge(net)
        print(f"{ep} sampled {torch.stack(costs).mean().item():.4f} test greedy {greedy_length(net, test).mean().item():.4f}")
    torch.save(net.state_dict(), "router.pt")


if __name__ == "__main__":
    main()
