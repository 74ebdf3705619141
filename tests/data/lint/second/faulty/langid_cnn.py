import torch
import torch.nn as nn
import torchaudio
from torch.utils.data import DataLoader, random_split

from commonvoice import LanguageClips

LANGS = ["de", "en", "es", "fr", "it", "pl"]


class SpecAugment(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = torchaudio.transforms.FrequencyMasking(12)
        self.t = torchaudio.transforms.TimeMasking(40)

    def forward(self, x):
        return self.t(self.f(x)) if self.training else x


class LangNet(nn.Module):
    def __init__(self, n=len(LANGS)):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=64)
        self.aug = SpecAugment()
        chans = [1, 32, 64, 128, 256]
        self.features = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in zip(chans, chans[1:])])
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, n),
            nn.Softmax(dim=1),
        )

    def forward(self, wav):
        x = self.aug(self.mel(wav).clamp_min(1e-6).log()).unsqueeze(1)
        return self.classifier(self.features(x))


def accuracy(net, loader, device):
    net.eval()
    with torch.no_grad():
        pairs = [(net(w.to(device)).argmax(1).cpu(), y) for w, y in loader]
    p, y = (torch.cat(t) for t in zip(*pairs))
    return (p == y).float().mean().item()


def main():
    gen = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ds = LanguageClips("clips", LANGS, seconds=4)
    n_val = len(ds) // 10
    train_ds, val_ds = random_split(ds, [len(ds) - n_val, n_val], generator=gen)
    train_dl = DataLoader(train_ds, 64, shuffle=True, num_workers=6)
    val_dl = DataLoader(val_ds, 128, num_workers=6)
    net = LangNet().to(device)
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", patience=3)
    for epoch in range(40):
        net.train()
        running = 0.0
        for wav, y in train_dl:
            opt.zero_grad()
            loss = criterion(net(wav.to(device)), y.to(device))
            loss.backward()
            opt.step()
            running += loss.item()
        acc = accuracy(net, val_dl, device)
        sched.step(acc)
        print(f"{epoch:02d} loss {running / len(train_dl):.4f} val {acc:.4f}")
    torch.save(net.state_dict(), "langid.pt")


if __name__ == "__main__":
    main()
