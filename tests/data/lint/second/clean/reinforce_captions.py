import argparse

import torch
import torch.nn as nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader

from captions import CaptionFeatures, cider_reward

BOS, EOS, MAXLEN = 1, 2, 20


class Captioner(nn.Module):
    def __init__(self, vocab, feat=2048, d=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.init = nn.Linear(feat, d)
        self.cell = nn.GRUCell(d, d)
        self.out = nn.Linear(d, vocab)

    def rollout(self, feats, greedy=False):
        h = torch.tanh(self.init(feats))
        tok = torch.full((feats.size(0),), BOS, device=feats.device)
        alive = torch.ones_like(tok, dtype=torch.bool)
        seq, logps = [], []
        for _ in range(MAXLEN):
            h = self.cell(self.emb(tok), h)
            dist = Categorical(logits=self.out(h))
            tok = dist.probs.argmax(-1) if greedy else dist.sample()
            logps.append(dist.log_prob(tok) * alive)
            seq.append(tok.masked_fill(~alive, 0))
            alive = alive & (tok != EOS)
        return torch.stack(seq, 1), torch.stack(logps, 1)


def self_critical(model, feats, refs):
    model.eval()
    with torch.no_grad():
        base, _ = model.rollout(feats, greedy=True)
    model.train()
    sample, logp = model.rollout(feats)
    advantage = cider_reward(sample, refs) - cider_reward(base, refs)
    advantage = advantage.to(feats.device)
    terms = []
    for t in range(logp.size(1)):
        terms.append(-(advantage * logp[:, t]).mean())
    return torch.stack(terms).sum(), advantage.mean().item()


def validate(model, loader, device):
    model.eval()
    scores = []
    with torch.no_grad():
        for feats, refs in loader:
            seq, _ = model.rollout(feats.to(device), greedy=True)
            scores.append(cider_reward(seq, refs).mean().item())
    return sum(scores) / len(scores)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--init", default="xe_model.pt")
    ap.add_argument("--lr", type=float, default=5e-5)
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--vocab", type=int, default=9488)
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(8)
    model = Captioner(args.vocab).to(device)
    model.load_state_dict(torch.load(args.init, map_location=device))
    train_dl = DataLoader(CaptionFeatures("train"), 50, shuffle=True, collate_fn=CaptionFeatures.collate)
    val_dl = DataLoader(CaptionFeatures("val"), 100, collate_fn=CaptionFeatures.collate)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    best = validate(model, val_dl, device)
    for epoch in range(args.epochs):
        for it, (feats, refs) in enumerate(train_dl):
            loss, adv = self_critical(model, feats.to(device), refs)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            if it % 50 == 0:
                print(f"{epoch}.{it} loss {loss.item():.4f} advantage {adv:+.4f}")
        score = validate(model, val_dl, device)
        print(f"epoch {epoch} cider {score:.4f}")
        if score > best:
            best = score
            torch.save(model.state_dict(), "rl_model.pt")


if __name__ == "__main__":
    main()
