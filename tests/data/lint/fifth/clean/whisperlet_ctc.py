import argparse
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from torch.utils.data import DataLoader

from textproc import Alphabet, collate_speech

MELS = 80


class Acoustic(nn.Module):
    def __init__(self, n_out, d=384):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv1d(MELS, d, 5, stride=2, padding=2), nn.GELU(),
                                 nn.Conv1d(d, d, 5, stride=2, padding=2), nn.GELU())
        self.rnn = nn.LSTM(d, d // 2, 4, batch_first=True, bidirectional=True, dropout=0.15)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, n_out)

    def forward(self, mel):
        x = self.sub(mel).transpose(1, 2)
        x, _ = self.rnn(x)
        return self.head(self.norm(x))


def out_len(n):
    for _ in range(2):
        n = (n - 1) // 2 + 1
    return n


def ctc(logits, targets, in_len, tgt_len):
    logp = F.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    return F.ctc_loss(logp, targets, out_len(in_len), tgt_len, blank=0, zero_infinity=True)


def train_epoch(net, loader, opt, scaler, sched, accum, dev):
    net.train()
    opt.zero_grad(set_to_none=True)
    meter, n_batches = 0.0, len(loader)
    for i, (mel, mel_len, tgt, tgt_len) in enumerate(loader, 1):
        group = accum if i <= n_batches - n_batches % accum else n_batches % accum
        with torch.autocast("cuda", dtype=torch.float16):
            logits = net(mel.to(dev))
        loss = ctc(logits, tgt.to(dev), mel_len.to(dev), tgt_len.to(dev))
        scaler.scale(loss / group).backward()
        meter += loss.item()
        if i % accum == 0 or i == n_batches:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            sched.step()
    return meter / n_batches


@torch.inference_mode()
def cer(net, loader, alphabet, dev):
    net.eval()
    edits = chars = 0
    for mel, mel_len, tgt, tgt_len in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            best = net(mel.to(dev)).argmax(-1).cpu()
        for row, n, ref, m in zip(best, out_len(mel_len), tgt, tgt_len):
            hyp = alphabet.collapse(row[:n].tolist())
            edits += torchaudio.functional.edit_distance(hyp, ref[:m].tolist())
            chars += int(m)
    return edits / max(chars, 1)


def main(argv):
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/librispeech")
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    a = ap.parse_args(argv)
    dev = torch.device("cuda")
    ab = Alphabet.english()
    mk = lambda split, sh: DataLoader(torchaudio.datasets.LIBRISPEECH(a.root, url=split), a.bs, shuffle=sh,
                                      collate_fn=collate_speech(ab, MELS), num_workers=8)
    tr, dv = mk("train-clean-100", True), mk("dev-clean", False)
    net = Acoustic(len(ab)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-3)
    updates = a.epochs * -(-len(tr) // a.accum)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=updates, pct_start=0.2)
    scaler = torch.amp.GradScaler("cuda")
    best = 1e9
    for ep in range(a.epochs):
        tl = train_epoch(net, tr, opt, scaler, sched, a.accum, dev)
        err = cer(net, dv, ab, dev)
        print(f"{ep}: ctc {tl:.3f} dev CER {err:.3%}", flush=True)
        if err < best:
            best = err
            torch.save(net.state_dict(), "acoustic.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
