import argparse
import math

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="word-level LSTM language model")
parser.add_argument("--data", default="tokens.pt")
parser.add_argument("--emsize", type=int, default=200)
parser.add_argument("--nhid", type=int, default=200)
parser.add_argument("--lr", type=float, default=20.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--bptt", type=int, default=35)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--save", default="lstm.pt")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers=2, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nlayers, self.nhid = nlayers, nhid

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        logits = self.decoder(self.drop(out))
        return torch.log_softmax(logits.flatten(0, 1), dim=-1), hidden

    def init_hidden(self, bsz):
        w = next(self.parameters())
        return (w.new_zeros(self.nlayers, bsz, self.nhid), w.new_zeros(self.nlayers, bsz, self.nhid))


def repackage(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage(v) for v in h)


def batchify(ids, bsz):
    n = ids.size(0) // bsz
    return ids[:n * bsz].view(bsz, -1).t().contiguous().to(device)


def get_batch(source, i):
    n = min(args.bptt, len(source) - 1 - i)
    return source[i:i + n], source[i + 1:i + 1 + n].reshape(-1)


corpus = torch.load(args.data)
train_data, val_data, test_data = (batchify(corpus[k], b) for k, b in (("train", 20), ("valid", 10), ("test", 10)))
model = RNNModel(corpus["ntokens"], args.emsize, args.nhid).to(device)
criterion = nn.NLLLoss()


def evaluate(source):
    model.eval()
    total = 0.0
    hidden = model.init_hidden(source.size(1))
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            x, y = get_batch(source, i)
            out, hidden = model(x, hidden)
            total += len(x) * criterion(out, y).item()
    return total / (len(source) - 1)


def train(lr, epoch):
    model.train()
    running = 0.0
    hidden = model.init_hidden(train_data.size(1))
    for b, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        x, y = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage(hidden)
        out, hidden = model(x, hidden)
        loss = criterion(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
        running += loss.item()
        if b % 200 == 0 and b > 0:
            print(f"epoch {epoch} batch {b} lr {lr:.2f} ppl {math.exp(running / 200):.2f}")
            running = 0.0


lr, best = args.lr, None
for epoch in range(1, args.epochs + 1):
    train(lr, epoch)
    val = evaluate(val_data)
    print(f"end of epoch {epoch}: valid loss {val:.3f} ppl {math.exp(val):.2f}")
    if best is None or val < best:
        best = val
        torch.save(model.state_dict(), args.save)
    else:
        lr /= 4.0
model.load_state_dict(torch.load(args.save))
print("test loss", evaluate(test_data))
