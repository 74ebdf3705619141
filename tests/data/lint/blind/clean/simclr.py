import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.models import resnet50

from twoviews import TwoViewLoader


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.encoder = resnet50()
        width = self.encoder.fc.in_features
        self.encoder.fc = nn.Identity()
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, dim))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=-1)


def nt_xent(z1, z2, temperature=0.2):
    n = z1.size(0)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)


def main():
    device = "cuda"
    loader = TwoViewLoader("imagenet/train", batch_size=512)
    model = SimCLR().to(device)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.SGD([{"params": decay, "weight_decay": 1e-4}, {"params": no_decay, "weight_decay": 0.0}],
                          lr=0.6, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200 * len(loader))
    model.train()
    for epoch in range(200):
        for (v1, v2), _ in loader:
            v1, v2 = v1.to(device), v2.to(device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                z1, z2 = model(v1), model(v2)
            loss = nt_xent(z1.float(), z2.float())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
        torch.save(model.encoder.state_dict(), "encoder.pt")


if __name__ == "__main__":
    main()
