import torch
import torch.nn as nn
import torchaudio
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from text import TextTransform, greedy_decode, wer

BLANK = 28
text = TextTransform()
mel = nn.Sequential(torchaudio.transforms.MelSpectrogram(16000, n_mels=80), torchaudio.transforms.AmplitudeToDB())


def collate(batch):
    specs, labels, il, tl = [], [], [], []
    for wav, _, utt, *_ in batch:
        s = mel(wav).squeeze(0).transpose(0, 1)
        t = torch.tensor(text.encode(utt.lower()))
        specs.append(s); labels.append(t)
        il.append(s.size(0) // 2); tl.append(len(t))
    pad = nn.utils.rnn.pad_sequence
    return pad(specs, batch_first=True), pad(labels, batch_first=True), torch.tensor(il), torch.tensor(tl)


class SpeechNet(nn.Module):
    def __init__(self, n_mels=80, hid=512, vocab=29):
        super().__init__()
        self.sub = nn.Conv1d(n_mels, hid, 3, stride=2, padding=1)
        self.rnn = nn.GRU(hid, hid, 4, batch_first=True, bidirectional=True, dropout=0.1)
        self.out = nn.Linear(2 * hid, vocab)

    def forward(self, x):
        x = torch.relu(self.sub(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.rnn(x)[0])


class AmpStepper:
    """Runs scale / unscale / clip / step / update in one place."""

    def __init__(self, model, opt, sched, max_norm=5.0):
        self.model, self.opt, self.sched, self.max_norm = model, opt, sched, max_norm
        self.scaler = torch.cuda.amp.GradScaler()

    def _clip(self):
        return clip_grad_norm_(self.model.parameters(), self.max_norm)

    def __call__(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = self._clip()
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.sched.step()
        return norm.item()


def evaluate(model, loader):
    model.eval()
    errs, n = 0.0, 0
    with torch.inference_mode():
        for x, y, il, tl in loader:
            lp = model(x.cuda()).log_softmax(-1).cpu()
            for k in range(len(x)):
                errs += wer(text.decode(y[k, :tl[k]].tolist()), greedy_decode(lp[k, :il[k]], BLANK))
                n += 1
    return errs / n


def main(epochs=20):
    torch.manual_seed(7)
    D = torchaudio.datasets.LIBRISPEECH
    train_dl = DataLoader(D("data", "train-clean-100", download=True), 16, shuffle=True, collate_fn=collate, num_workers=8)
    dev_dl = DataLoader(D("data", "dev-clean", download=True), 16, collate_fn=collate, num_workers=4)
    model = SpeechNet().cuda()
    ctc = nn.CTCLoss(blank=BLANK, zero_infinity=True)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=epochs * len(train_dl), anneal_strategy="linear")
    step = AmpStepper(model, opt, sched)
    for epoch in range(epochs):
        model.train()
        for i, (x, y, il, tl) in enumerate(train_dl):
            with torch.cuda.amp.autocast():
                logits = model(x.cuda())
            logp = logits.float().log_softmax(-1).transpose(0, 1)
            loss = ctc(logp, y.cuda(), il, tl)
            norm = step(loss)
            if i % 100 == 0:
                print(f"{epoch}:{i} ctc {loss.item():.3f} |g| {norm:.2f}")
        print("dev wer", evaluate(model, dev_dl))
        torch.save(model.state_dict(), f"speech_{epoch}.pt")


if __name__ == "__main__":
    main()
