import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from wmt import BitextDataset, collate_bitext, PAD

D_MODEL, WARMUP, EPOCHS = 512, 4000, 12


class Translator(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, D_MODEL, padding_idx=PAD)
        self.core = nn.Transformer(D_MODEL, 8, 6, 6, 2048, 0.1, batch_first=True)
        self.out = nn.Linear(D_MODEL, vocab)
        pos = torch.arange(512).unsqueeze(1)
        div = torch.exp(torch.arange(0, D_MODEL, 2) * (-math.log(10000.0) / D_MODEL))
        pe = torch.zeros(512, D_MODEL)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("pe", pe)

    def embed(self, x):
        return self.emb(x) * math.sqrt(D_MODEL) + self.pe[:x.size(1)]

    def forward(self, src, tgt):
        causal = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device), 1)
        h = self.core(self.embed(src), self.embed(tgt), tgt_mask=causal, src_key_padding_mask=src == PAD,
                      tgt_key_padding_mask=tgt == PAD, memory_key_padding_mask=src == PAD)
        return self.out(h)


def noam(step):
    step = max(step, 1)
    return D_MODEL ** -0.5 * min(step ** -0.5, step * WARMUP ** -1.5)


def run_epoch(model, loader, criterion, device, optimizer=None, scheduler=None):
    training = optimizer is not None
    model.train(training)
    total, tokens = 0.0, 0
    with torch.set_grad_enabled(training):
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            logits = model(src, tgt[:, :-1])
            gold = tgt[:, 1:]
            n = (gold != PAD).sum().item()
            loss = criterion(logits.flatten(0, 1), gold.flatten())
            if training:
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                scheduler.step()
                optimizer.step()
            total += loss.item() * n
            tokens += n
    return total / tokens


def main():
    torch.manual_seed(31)
    device = torch.device("cuda")
    train_ds, dev_ds = BitextDataset("train"), BitextDataset("dev")
    model = Translator(train_ds.vocab_size).to(device)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)
    train_dl = DataLoader(train_ds, 64, shuffle=True, collate_fn=collate_bitext, num_workers=4)
    dev_dl = DataLoader(dev_ds, 64, collate_fn=collate_bitext)
    for epoch in range(EPOCHS):
        a = run_epoch(model, train_dl, criterion, device, optimizer, scheduler)
        b = run_epoch(model, dev_dl, criterion, device)
        print(f"epoch {epoch} train {a:.3f} dev {b:.3f} ppl {math.exp(b):.2f}")
        torch.save(model.state_dict(), "mt.pt")


if __name__ == "__main__":
    main()
