import random

import torch
import torch.nn as nn

from translation import PAD, SOS, bleu, vocab_sizes, train_iter, valid_iter


class Encoder(nn.Module):
    def __init__(self, vocab, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, src):
        return self.gru(self.emb(src))


class Decoder(nn.Module):
    def __init__(self, vocab, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.gru = nn.GRU(2 * dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tok, hidden, memory):
        query = hidden[-1].unsqueeze(2)
        weights = torch.softmax(torch.bmm(memory, query).squeeze(2), dim=1)
        ctx = torch.bmm(weights.unsqueeze(1), memory)
        y, hidden = self.gru(torch.cat([self.emb(tok), ctx], dim=2), hidden)
        return self.out(y.squeeze(1)), hidden


def decode(encoder, decoder, src, tgt, teacher_forcing):
    memory, hidden = encoder(src)
    tok = torch.full((src.size(0), 1), SOS, device=src.device)
    steps = []
    for i in range(tgt.size(1)):
        logits, hidden = decoder(tok, hidden, memory)
        steps.append(logits)
        tok = tgt[:, i:i + 1] if random.random() < teacher_forcing else logits.argmax(1, keepdim=True)
    return torch.stack(steps, dim=1)


def main():
    src_v, tgt_v = vocab_sizes()
    enc, dec = Encoder(src_v).cuda(), Decoder(tgt_v).cuda()
    params = list(enc.parameters()) + list(dec.parameters())
    optimizer = torch.optim.Adam(params, lr=5e-4)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    for epoch in range(15):
        enc.train()
        dec.train()
        for src, tgt in train_iter():
            src, tgt = src.cuda(), tgt.cuda()
            logits = decode(enc, dec, src, tgt, teacher_forcing=0.5)
            loss = criterion(logits.reshape(-1, tgt_v), tgt.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        enc.eval()
        dec.eval()
        with torch.no_grad():
            outs = [(decode(enc, dec, s.cuda(), t.cuda(), 0.0).argmax(-1).cpu(), t) for s, t in valid_iter()]
        print(epoch, bleu(outs))


if __name__ == "__main__":
    main()
