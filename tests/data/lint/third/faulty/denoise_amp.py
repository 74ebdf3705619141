import torch
import torch.nn as nn
from torch.cuda import amp
from torch.utils.data import DataLoader, Dataset
from torchvision.io import read_image
from pathlib import Path


class NoisyPatches(Dataset):
    def __init__(self, folder, size=64, sigma=25 / 255):
        self.files, self.size, self.sigma = sorted(Path(folder).glob("*.png")), size, sigma

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        im = read_image(str(self.files[i])).float()[:3] / 255
        h = torch.randint(0, im.shape[1] - self.size + 1, ()).item()
        w = torch.randint(0, im.shape[2] - self.size + 1, ()).item()
        clean = im[:, h:h + self.size, w:w + self.size]
        return clean + self.sigma * torch.randn_like(clean), clean


class DnCNN(nn.Module):
    def __init__(self, depth=17, c=64):
        super().__init__()
        mid = []
        for _ in range(depth - 2):
            mid += [nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(True)]
        self.net = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.ReLU(True), *mid, nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x):
        return x - self.net(x)


@torch.no_grad()
def psnr(model, loader):
    model.eval()
    vals = []
    for noisy, clean in loader:
        mse = (model(noisy.cuda()).clamp(0, 1) - clean.cuda()).pow(2).mean((1, 2, 3))
        vals.append(-10 * mse.log10())
    return torch.cat(vals).mean().item()


def run(train_dir, val_dir, epochs=50):
    train_dl = DataLoader(NoisyPatches(train_dir), 64, shuffle=True, num_workers=4, drop_last=True)
    val_dl = DataLoader(NoisyPatches(val_dir), 64, num_workers=2)
    model = DnCNN().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 40], 0.1)
    scaler = amp.GradScaler(init_scale=2.0 ** 14)
    loss_fn = nn.MSELoss()
    for epoch in range(epochs):
        model.train()
        seen = 0.0
        for noisy, clean in train_dl:
            noisy, clean = noisy.cuda(), clean.cuda()
            optimizer.zero_grad()
            with amp.autocast():
                loss = loss_fn(model(noisy), clean)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            seen += loss.item()
        scheduler.step()
        print(f"[{epoch}] mse {seen / len(train_dl):.5f} psnr {psnr(model, val_dl):.2f}")
    torch.save(model.state_dict(), "dncnn.pth")


if __name__ == "__main__":
    run("bsd/train", "bsd/val")
