import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision.datasets import Food101
from torchvision.models import ResNet50_Weights, resnet50


class Probe(nn.Module):
    def __init__(self, backbone, dim, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(dim, classes)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            feats = self.backbone(x)
        return self.head(feats)


def main():
    weights = ResNet50_Weights.IMAGENET1K_V2
    backbone = resnet50(weights=weights)
    backbone.fc = nn.Identity()
    for p in backbone.parameters():
        p.requires_grad = False
    probe = Probe(backbone, 2048, 101).cuda()

    tf = weights.transforms()
    train_dl = DataLoader(Food101("data", "train", transform=tf), 256, shuffle=True, num_workers=8)
    test_dl = DataLoader(Food101("data", "test", transform=tf), 256, num_workers=8)
    opt = torch.optim.SGD(probe.head.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
    ce = nn.CrossEntropyLoss()

    for epoch in range(20):
        probe.train()
        for x, y in train_dl:
            loss = ce(probe(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        probe.eval()
        top1 = 0
        with torch.no_grad():
            for x, y in test_dl:
                top1 += (probe(x.cuda()).argmax(1) == y.cuda()).sum().item()
        print(f"epoch {epoch} top1 {100 * top1 / len(test_dl.dataset):.2f}")


if __name__ == "__main__":
    main()
