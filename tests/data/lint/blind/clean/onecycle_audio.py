import torch
import torchaudio
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from speech_commands import subset_loader


class M5(nn.Module):
    def __init__(self, n_out=35, ch=32):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=64)
        self.conv = nn.Sequential(
            nn.Conv2d(1, ch, 5, 2), nn.BatchNorm2d(ch), nn.ReLU(),
            nn.Conv2d(ch, 2 * ch, 3, 2), nn.BatchNorm2d(2 * ch), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(2 * ch, n_out)

    def forward(self, wav):
        spec = (self.mel(wav) + 1e-6).log()
        return self.fc(self.conv(spec))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, valid = subset_loader("training", 256, True), subset_loader("validation", 256, False)
    model = M5().to(device)
    epochs = 20
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, max_lr=5e-3, epochs=epochs, steps_per_epoch=len(train))
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, epochs + 1):
        model.train()
        for step, (wav, label) in enumerate(train, 1):
            wav, label = wav.to(device), label.to(device)
            loss = criterion(model(wav), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 100 == 0:
                print(f"{epoch}/{step}: {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")

        model.eval()
        correct = 0
        with torch.inference_mode():
            for wav, label in valid:
                correct += model(wav.to(device)).argmax(-1).eq(label.to(device)).sum().item()
        print(f"valid accuracy {correct / len(valid.dataset):.3%}")


if __name__ == "__main__":
    main()
