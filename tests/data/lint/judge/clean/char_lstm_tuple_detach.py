import torch
from torch import nn


class CharRNN(nn.Module):
    def __init__(self, tokens, hidden=512):
        super().__init__()
        self.lstm = nn.LSTM(tokens, hidden, 2, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(hidden, tokens)

    def forward(self, x, h):
        out, h = self.lstm(x, h)
        return self.fc(self.drop(out).flatten(0, 1)), h

    def init_hidden(self, n):
        return (torch.zeros(2, n, 512), torch.zeros(2, n, 512))


def train(net, data, epochs=10, lr=0.001, clip=5):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    train_data, val_data = data
    counter = 0
    for e in range(epochs):
        net.train()
        h = net.init_hidden(128)
        for x, y in get_batches(train_data, 128, 100):
            counter += 1
            h = tuple([each.data for each in h])
            net.zero_grad()
            output, h = net(x, h)
            loss = criterion(output, y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            if counter % 50 == 0:
                val_h = net.init_hidden(128)
                val_losses = []
                net.eval()
                with torch.no_grad():
                    for vx, vy in get_batches(val_data, 128, 100):
                        output, val_h = net(vx, val_h)
                        val_losses.append(criterion(output, vy.flatten()).item())
                net.train()
                print(e, counter, loss.item(), sum(val_losses) / len(val_losses))
