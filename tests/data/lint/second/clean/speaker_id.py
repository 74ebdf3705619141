"""Speaker embeddings with additive-margin softmax; verification runs in half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from voxlike import SpeakerCuts, trial_list


class StatsPool(nn.Module):
    def forward(self, x):
        return torch.cat([x.mean(-1), x.std(-1)], dim=1)


class XVector(nn.Module):
    def __init__(self, feats=40, emb=192):
        super().__init__()
        spec = [(feats, 512, 5, 1), (512, 512, 3, 2), (512, 512, 3, 3), (512, 1500, 1, 1)]
        self.frames = nn.Sequential(*[
            nn.Sequential(nn.Conv1d(i, o, k, dilation=d), nn.ReLU(), nn.BatchNorm1d(o)) for i, o, k, d in spec])
        self.pool, self.fc = StatsPool(), nn.Linear(3000, emb)

    def forward(self, x):
        return self.fc(self.pool(self.frames(x)))


class AMSoftmax(nn.Module):
    def __init__(self, emb, n_spk, s=30.0, m=0.2):
        super().__init__()
        self.w = nn.Parameter(torch.empty(n_spk, emb))
        nn.init.xavier_normal_(self.w)
        self.s, self.m = s, m

    def forward(self, e, y):
        cos = F.linear(F.normalize(e), F.normalize(self.w))
        margin = F.one_hot(y, cos.size(1)) * self.m
        return F.cross_entropy(self.s * (cos - margin), y), cos


@torch.inference_mode()
def equal_error_rate(net, device):
    net.eval()
    scores, labels = [], []
    for a, b, same in trial_list():
        with torch.autocast("cuda", dtype=torch.float16):
            ea, eb = net(a.to(device)), net(b.to(device))
        scores.append(F.cosine_similarity(ea.float(), eb.float()).cpu())
        labels.append(same)
    s, l = torch.cat(scores), torch.cat(labels).bool()
    thr = s.sort().values
    frr = torch.stack([(s[l] < t).float().mean() for t in thr])
    far = torch.stack([(s[~l] >= t).float().mean() for t in thr])
    k = (frr - far).abs().argmin()
    net.train()
    return ((frr[k] + far[k]) / 2).item()


def main():
    torch.manual_seed(1)
    device = torch.device("cuda")
    ds = SpeakerCuts("train", frames=200)
    dl = DataLoader(ds, 128, shuffle=True, num_workers=8, drop_last=True)
    net, head = XVector().to(device), AMSoftmax(192, ds.n_speakers).to(device)
    params = list(net.parameters()) + list(head.parameters())
    opt = torch.optim.SGD([
        {"params": net.parameters(), "weight_decay": 2e-5},
        {"params": head.parameters(), "weight_decay": 2e-4},
    ], lr=0.2, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=8, gamma=0.1)
    for epoch in range(24):
        net.train()
        hit = n = 0
        for x, y in dl:
            x, y = x.to(device), y.to(device)
            opt.zero_grad()
            loss, cos = head(net(x), y)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"loss became {loss.item()} in epoch {epoch}")
            loss.backward()
            nn.utils.clip_grad_norm_(params, 5.0)
            opt.step()
            hit += (cos.argmax(1) == y).sum().item()
            n += len(y)
        sched.step()
        print(f"epoch {epoch} train acc {hit / n:.3f} EER {100 * equal_error_rate(net, device):.2f}%")
        torch.save({"net": net.state_dict(), "head": head.state_dict()}, "xvector.pt")


if __name__ == "__main__":
    main()
