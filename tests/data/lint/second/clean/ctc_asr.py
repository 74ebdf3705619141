import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from torch.utils.data import DataLoader

BLANK = 0
VOCAB = "_ 'abcdefghijklmnopqrstuvwxyz"
LOOKUP = {c: i for i, c in enumerate(VOCAB)}

train_tf = nn.Sequential(
    torchaudio.transforms.MelSpectrogram(sample_rate=16000, n_mels=80),
    torchaudio.transforms.FrequencyMasking(15),
    torchaudio.transforms.TimeMasking(35),
)
valid_tf = torchaudio.transforms.MelSpectrogram(sample_rate=16000, n_mels=80)


def collate(items, tf):
    specs, labels, in_len, lab_len = [], [], [], []
    for wav, _, text, *_ in items:
        s = tf(wav).squeeze(0).t().clamp_min(1e-5).log()
        y = torch.tensor([LOOKUP[c] for c in text.lower() if c in LOOKUP])
        specs.append(s)
        labels.append(y)
        in_len.append(s.size(0) // 2)
        lab_len.append(len(y))
    specs = nn.utils.rnn.pad_sequence(specs, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(labels, batch_first=True)
    return specs, labels, torch.tensor(in_len), torch.tensor(lab_len)


class Recognizer(nn.Module):
    def __init__(self, n_mels=80, dim=384, n_out=len(VOCAB)):
        super().__init__()
        self.sub = nn.Conv1d(n_mels, dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.rnn = nn.GRU(dim, dim // 2, num_layers=3, bidirectional=True, batch_first=True, dropout=0.1)
        self.fc = nn.Linear(dim, n_out)

    def forward(self, x):
        x = F.gelu(self.sub(x.transpose(1, 2))).transpose(1, 2)
        x, _ = self.rnn(self.norm(x))
        return self.fc(x)


def ctc(criterion, logits, y, in_len, lab_len):
    logp = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    return criterion(logp, y, in_len.clamp(max=logp.size(0)), lab_len)


def train_epoch(model, loader, criterion, opt, sched, device, epoch):
    model.train()
    for i, (x, y, il, yl) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        opt.zero_grad()
        loss = ctc(criterion, model(x), y, il, yl)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        sched.step()
        if i % 100 == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] loss {loss.item():.3f} lr {sched.get_last_lr()[0]:.2e}")


@torch.inference_mode()
def validate(model, loader, criterion, device):
    model.eval()
    total = torch.zeros((), device=device)
    for x, y, il, yl in loader:
        total += ctc(criterion, model(x.to(device)), y.to(device), il, yl)
    return (total / len(loader)).item()


def main(epochs=20):
    torch.manual_seed(7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    root = "./data"
    train_ds = torchaudio.datasets.LIBRISPEECH(root, url="train-clean-100", download=True)
    dev_ds = torchaudio.datasets.LIBRISPEECH(root, url="dev-clean", download=True)
    train_loader = DataLoader(train_ds, 16, shuffle=True, num_workers=4, collate_fn=lambda b: collate(b, train_tf))
    dev_loader = DataLoader(dev_ds, 16, collate_fn=lambda b: collate(b, valid_tf))
    model = Recognizer().to(device)
    criterion = nn.CTCLoss(blank=BLANK, zero_infinity=True)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=5e-4, steps_per_epoch=len(train_loader), epochs=epochs, anneal_strategy="linear")
    for epoch in range(epochs):
        train_epoch(model, train_loader, criterion, opt, sched, device, epoch)
        print("dev loss", validate(model, dev_loader, criterion, device))
        torch.save(model.state_dict(), "asr.pt")


if __name__ == "__main__":
    main()
