import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader

from newsgroups import News, pad_batch


class BiGRU(nn.Module):
    def __init__(self, vocab, classes, dim=100):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.gru = nn.GRU(dim, dim, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.4)
        self.fc = nn.Linear(2 * dim, classes)
        self.log_softmax = nn.LogSoftmax(dim=1)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.emb(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.log_softmax(self.fc(self.drop(torch.cat([h[0], h[1]], dim=1))))


def step_loss(model, batch, criterion):
    ids, lengths, labels = batch
    return criterion(model(ids, lengths), labels)


def main():
    train, dev = News("train"), News("dev")
    train_dl = DataLoader(train, 32, shuffle=True, collate_fn=pad_batch)
    dev_dl = DataLoader(dev, 64, collate_fn=pad_batch)
    model = BiGRU(len(train.vocab), len(train.labels))
    criterion = nn.NLLLoss()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    history = []
    for epoch in range(10):
        model.train()
        losses = []
        for batch in train_dl:
            model.zero_grad()
            loss = step_loss(model, batch, criterion)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            dev_loss = sum(step_loss(model, b, criterion) for b in dev_dl) / len(dev_dl)
        history.append((sum(losses) / len(losses), float(dev_loss)))
        print(epoch, *history[-1])


if __name__ == "__main__":
    main()
