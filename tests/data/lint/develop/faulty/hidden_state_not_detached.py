import torch
from torch import nn


class CharModel(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.embed(x), hidden)
        return self.head(out), hidden


def train(model, chunks, optimizer, criterion):
    model.train()
    hidden = None
    for inputs, targets in chunks:
        optimizer.zero_grad()
        output, hidden = model(inputs, hidden)
        loss = criterion(output.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
