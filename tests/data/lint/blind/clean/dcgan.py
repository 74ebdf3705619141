import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image

nz, ngf, ndf, size = 100, 64, 64, 64
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def up(i, o, s=2, p=1):
    return [nn.ConvTranspose2d(i, o, 4, s, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]


def down(i, o):
    return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, True)]


netG = nn.Sequential(*up(nz, ngf * 8, 1, 0), *up(ngf * 8, ngf * 4), *up(ngf * 4, ngf * 2), *up(ngf * 2, ngf),
                     nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh()).to(dev)
netD = nn.Sequential(nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2, True), *down(ndf, ndf * 2),
                     *down(ndf * 2, ndf * 4), *down(ndf * 4, ndf * 8),
                     nn.Conv2d(ndf * 8, 1, 4, 1, 0), nn.Sigmoid(), nn.Flatten(0)).to(dev)
criterion = nn.BCELoss()
optG = torch.optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
tf = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor(),
                         transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
loader = DataLoader(datasets.ImageFolder("faces", tf), 128, shuffle=True, num_workers=4, drop_last=True)
fixed = torch.randn(64, nz, 1, 1, device=dev)

for epoch in range(25):
    for i, (real, _) in enumerate(loader):
        real = real.to(dev)
        b = real.size(0)
        ones, zeros = torch.ones(b, device=dev), torch.zeros(b, device=dev)

        netD.zero_grad()
        errD_real = criterion(netD(real), ones)
        errD_real.backward()
        fake = netG(torch.randn(b, nz, 1, 1, device=dev))
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optD.step()

        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optG.step()

        if i % 100 == 0:
            print(epoch, i, (errD_real + errD_fake).item(), errG.item())
    with torch.no_grad():
        save_image(netG(fixed), f"samples_{epoch:02d}.png", normalize=True)
