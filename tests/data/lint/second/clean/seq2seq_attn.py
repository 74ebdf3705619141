# Neural machine translation with an attentive GRU, converted from a notebook.
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim

from data_utils import load_pairs, make_loader, SOS, EOS, PAD

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
random.seed(3)
torch.manual_seed(3)

# In[2]:
train_pairs, valid_pairs, src_vocab, tgt_vocab = load_pairs("eng-fra.txt")
train_loader = make_loader(train_pairs, 64, shuffle=True)
valid_loader = make_loader(valid_pairs, 64, shuffle=False)


# In[3]:
class Encoder(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=PAD)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.gru(self.drop(self.emb(x)))


class Decoder(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=PAD)
        self.gru = nn.GRU(2 * d, d, batch_first=True)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 1)
        self.out = nn.Linear(d, vocab)

    def step(self, tok, hidden, memory):
        e = self.emb(tok).unsqueeze(1)
        score = self.v(torch.tanh(self.q(hidden[-1]).unsqueeze(1) + self.k(memory)))
        ctx = (F.softmax(score, dim=1) * memory).sum(1, keepdim=True)
        o, hidden = self.gru(torch.cat([e, ctx], -1), hidden)
        return self.out(o.squeeze(1)), hidden


encoder = Encoder(len(src_vocab), 256).to(device)
decoder = Decoder(len(tgt_vocab), 256).to(device)
enc_opt = optim.Adam(encoder.parameters(), lr=1e-3)
dec_opt = optim.Adam(decoder.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)


# In[4]:
def unroll(src, tgt, teacher_ratio):
    memory, hidden = encoder(src)
    tok = torch.full((src.size(0),), SOS, device=device)
    loss = 0
    for t in range(tgt.size(1)):
        logits, hidden = decoder.step(tok, hidden, memory)
        loss += criterion(logits, tgt[:, t])
        if random.random() < teacher_ratio:
            tok = tgt[:, t]
        else:
            tok = logits.argmax(-1).detach()
    return loss / tgt.size(1)


def train_one(src, tgt):
    loss = unroll(src, tgt, teacher_ratio=0.5)
    loss.backward()
    nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    enc_opt.step()
    dec_opt.step()
    enc_opt.zero_grad()
    dec_opt.zero_grad()
    return loss.item()


def valid_loss():
    encoder.eval(); decoder.eval()
    with torch.no_grad():
        vals = [unroll(s.to(device), t.to(device), 0.0).item() for s, t in valid_loader]
    encoder.train(); decoder.train()
    return sum(vals) / len(vals)


# In[5]:
history = []
for epoch in range(1, 31):
    losses = []
    for src, tgt in train_loader:
        losses.append(train_one(src.to(device), tgt.to(device)))
    history.append((sum(losses) / len(losses), valid_loss()))
    print("epoch %d train %.3f valid %.3f" % (epoch, *history[-1]))
