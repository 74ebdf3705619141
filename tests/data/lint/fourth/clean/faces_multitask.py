import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader

from utkface import UTKFace


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        base = torchvision.models.resnet34(weights="DEFAULT")
        feats = base.fc.in_features
        base.fc = nn.Identity()
        self.trunk = base
        self.age = nn.Linear(feats, 1)
        self.gender = nn.Linear(feats, 1)
        self.race = nn.Linear(feats, 5)

    def forward(self, x):
        h = self.trunk(x)
        return self.age(h).squeeze(1), self.gender(h).squeeze(1), self.race(h)


def losses(out, y):
    age, gender, race = out
    return (nn.functional.smooth_l1_loss(age, y["age"] / 100.0),
            nn.functional.binary_cross_entropy_with_logits(gender, y["gender"].float()),
            nn.functional.cross_entropy(race, y["race"]))


def flat_grads(params):
    return [p.grad.detach().clone() for p in params]


def pcgrad_step(task_losses, shared, heads, opt):
    """Project conflicting trunk gradients; head gradients simply accumulate."""
    per_task = []
    for k, loss in enumerate(task_losses):
        for p in shared:
            p.grad = None
        last = k == len(task_losses) - 1
        loss.backward(retain_graph=not last)
        per_task.append(flat_grads(shared))
    merged = [torch.zeros_like(p) for p in shared]
    for i, gi in enumerate(per_task):
        gi = [g.clone() for g in gi]
        for j in torch.randperm(len(per_task)).tolist():
            if j == i:
                continue
            dot = sum((a * b).sum() for a, b in zip(gi, per_task[j]))
            if dot < 0:
                norm = sum((b * b).sum() for b in per_task[j])
                gi = [a - dot / norm * b for a, b in zip(gi, per_task[j])]
        for m, g in zip(merged, gi):
            m.add_(g)
    for p, m in zip(shared, merged):
        p.grad = m
    nn.utils.clip_grad_norm_(shared + heads, 5.0)
    opt.step()
    opt.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    mae = g_ok = r_ok = n = 0
    for x, y in loader:
        age, gender, race = (o.cpu() for o in model(x.to(device)))
        mae += (age * 100 - y["age"]).abs().sum().item()
        g_ok += ((gender.sigmoid() > 0.5).long() == y["gender"]).sum().item()
        r_ok += (race.softmax(1).argmax(1) == y["race"]).sum().item()
        n += len(x)
    return mae / n, g_ok / n, r_ok / n


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_dl = DataLoader(UTKFace("data", "train"), 64, shuffle=True, num_workers=4, drop_last=True)
    val_dl = DataLoader(UTKFace("data", "val"), 128, num_workers=4)
    model = MultiHead().to(device)
    shared = [p for p in model.trunk.parameters()]
    heads = [p for m in (model.age, model.gender, model.race) for p in m.parameters()]
    opt = torch.optim.Adam([{"params": shared, "lr": 1e-4}, {"params": heads, "lr": 1e-3}])
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for epoch in range(20):
        model.train()
        sums = [0.0, 0.0, 0.0]
        for x, y in train_dl:
            y = {k: v.to(device) for k, v in y.items()}
            ls = losses(model(x.to(device)), y)
            pcgrad_step(ls, shared, heads, opt)
            sums = [s + l.item() for s, l in zip(sums, ls)]
        sched.step()
        print(epoch, ["%.3f" % (s / len(train_dl)) for s in sums], "val mae/gender/race", evaluate(model, val_dl, device))


if __name__ == "__main__":
    main()
