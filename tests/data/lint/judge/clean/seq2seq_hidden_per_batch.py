import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, token, hidden):
        output, hidden = self.gru(self.embed(token).unsqueeze(0), hidden)
        return self.out(output[0]), hidden


def train_pair(encoder, decoder, enc_opt, dec_opt, criterion, source, target):
    hidden = encoder.init_hidden(source.size(1))
    enc_opt.zero_grad()
    dec_opt.zero_grad()
    for token in source:
        _, hidden = encoder(token, hidden)
    loss = 0
    token = torch.zeros(source.size(1), dtype=torch.long)
    for wanted in target:
        logits, hidden = decoder(token, hidden)
        loss += criterion(logits, wanted)
        token = logits.argmax(1).detach()
    loss.backward()
    enc_opt.step()
    dec_opt.step()
    return loss.item() / len(target)


def train(encoder, decoder, pairs, lr=0.01):
    enc_opt = torch.optim.SGD(encoder.parameters(), lr=lr)
    dec_opt = torch.optim.SGD(decoder.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for i, (source, target) in enumerate(pairs, 1):
        total += train_pair(encoder, decoder, enc_opt, dec_opt, criterion, source, target)
        if i % 1000 == 0:
            print(i, total / 1000)
            total = 0.0
