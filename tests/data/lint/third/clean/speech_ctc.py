import torch
import torch.nn as nn
import torchaudio
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

ALPHABET = "_' abcdefghijklmnopqrstuvwxyz"
mel_train = nn.Sequential(torchaudio.transforms.MelSpectrogram(16000, n_mels=80),
                          torchaudio.transforms.FrequencyMasking(20), torchaudio.transforms.TimeMasking(60))
mel_eval = torchaudio.transforms.MelSpectrogram(16000, n_mels=80)


def collate(rows, mel):
    xs, ys, xl, yl = [], [], [], []
    for wav, _, text, *_ in rows:
        s = mel(wav).squeeze(0).t().clamp(min=1e-5).log()
        t = torch.tensor([ALPHABET.index(c) for c in text.lower() if c in ALPHABET[1:]])
        xs.append(s)
        ys.append(t)
        xl.append(len(s) // 2)
        yl.append(len(t))
    return (nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.cat(ys), torch.tensor(xl), torch.tensor(yl))


class SpeechNet(nn.Module):
    def __init__(self, h=384):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(80, h, 5, stride=2, padding=2), nn.BatchNorm1d(h), nn.GELU(), nn.Dropout(0.1))
        self.rnn = nn.GRU(h, h, 4, batch_first=True, bidirectional=True, dropout=0.1)
        self.out = nn.Linear(2 * h, len(ALPHABET))

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def greedy(lp):
    out = []
    for row in lp.argmax(-1):
        row = torch.unique_consecutive(row)
        out.append("".join(ALPHABET[i] for i in row.tolist() if i != 0))
    return out


def evaluate(model, dl, crit, dev):
    model.eval()
    total, shown = 0.0, None
    with torch.no_grad():
        for x, y, xl, yl in dl:
            lp = model(x.to(dev))
            total += crit(lp.transpose(0, 1), y.to(dev), xl.clamp(max=lp.size(1)), yl).item()
            shown = shown or greedy(lp[:1])[0]
    return total / len(dl), shown


def main():
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(7)
    get = lambda s: torchaudio.datasets.LIBRISPEECH("data", url=s, download=True)
    tr = DataLoader(get("train-clean-100"), 16, shuffle=True, num_workers=4, collate_fn=lambda r: collate(r, mel_train))
    va = DataLoader(get("dev-clean"), 16, num_workers=4, collate_fn=lambda r: collate(r, mel_eval))
    model = SpeechNet().to(dev)
    crit = nn.CTCLoss(blank=0, zero_infinity=True)
    epochs = 20
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    sched = OneCycleLR(opt, max_lr=5e-4, steps_per_epoch=len(tr), epochs=epochs, anneal_strategy="linear")
    for ep in range(epochs):
        model.train()
        for i, (x, y, xl, yl) in enumerate(tr):
            opt.zero_grad()
            lp = model(x.to(dev))
            loss = crit(lp.transpose(0, 1), y.to(dev), xl.clamp(max=lp.size(1)), yl)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            opt.step()
            sched.step()
            if i % 100 == 0:
                print(f"{ep}/{i} ctc {loss.item():.3f} lr {sched.get_last_lr()[0]:.2e}")
        v, text = evaluate(model, va, crit, dev)
        print(f"== {ep} dev {v:.3f} | {text}")


if __name__ == "__main__":
    main()
