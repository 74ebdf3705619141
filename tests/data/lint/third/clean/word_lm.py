# Word-level LSTM language model; plain SGD written by hand and annealed on validation loss.
import argparse
import math

import torch
import torch.nn as nn

from corpus import Corpus

parser = argparse.ArgumentParser()
parser.add_argument('--data', default='./wikitext-2')
parser.add_argument('--emsize', type=int, default=200)
parser.add_argument('--nhid', type=int, default=200)
parser.add_argument('--lr', type=float, default=20)
parser.add_argument('--clip', type=float, default=0.25)
parser.add_argument('--epochs', type=int, default=40)
parser.add_argument('--bptt', type=int, default=35)
parser.add_argument('--save', default='lm.pt')
args = parser.parse_args()
torch.manual_seed(1111)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
corpus = Corpus(args.data)
ntokens = len(corpus.dictionary)


def batchify(data, bsz):
    n = data.size(0) // bsz
    return data[:n * bsz].view(bsz, -1).t().contiguous().to(device)


train_data, val_data, test_data = batchify(corpus.train, 20), batchify(corpus.valid, 10), batchify(corpus.test, 10)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntokens, args.emsize)
        self.rnn = nn.LSTM(args.emsize, args.nhid, 2, dropout=0.2)
        self.decoder = nn.Linear(args.nhid, ntokens)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return torch.log_softmax(self.decoder(self.drop(out)).view(-1, ntokens), dim=1), hidden

    def init_hidden(self, bsz):
        w = next(self.parameters())
        return w.new_zeros(2, bsz, args.nhid), w.new_zeros(2, bsz, args.nhid)


model = RNNModel().to(device)
criterion = nn.NLLLoss()


def repackage(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage(v) for v in h)


def get_batch(source, i):
    n = min(args.bptt, len(source) - 1 - i)
    return source[i:i + n], source[i + 1:i + 1 + n].view(-1)


def evaluate(source):
    model.eval()
    total, hidden = 0., model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, args.bptt):
            x, y = get_batch(source, i)
            out, hidden = model(x, hidden)
            total += len(x) * criterion(out, y).item()
    return total / (len(source) - 1)


def train(lr):
    model.train()
    total, hidden = 0., model.init_hidden(20)
    for b, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        x, y = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage(hidden)
        out, hidden = model(x, hidden)
        loss = criterion(out, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
        total += loss.item()
        if b % 200 == 0 and b > 0:
            print('| {:5d} | lr {:5.2f} | ppl {:8.2f}'.format(b, lr, math.exp(total / 200)))
            total = 0.


lr, best = args.lr, None
for epoch in range(1, args.epochs + 1):
    train(lr)
    val = evaluate(val_data)
    print('epoch {} valid loss {:5.2f}'.format(epoch, val))
    if best is None or val < best:
        torch.save(model.state_dict(), args.save)
        best = val
    else:
        lr /= 4.0
model.load_state_dict(torch.load(args.save))
print('test loss {:5.2f}'.format(evaluate(test_data)))
