import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.preprocessing import MinMaxScaler

df = pd.read_csv("AAPL.csv", parse_dates=["Date"], index_col="Date")
prices = df[["Close"]].values
n_train = int(0.8 * len(prices))
scaler = MinMaxScaler((-1, 1))
scaler.fit(prices[:n_train])
prices = scaler.transform(prices)


def windows(arr, lookback=20):
    seqs = np.stack([arr[i:i + lookback + 1] for i in range(len(arr) - lookback)])
    return (torch.tensor(seqs[:, :-1], dtype=torch.float32), torch.tensor(seqs[:, -1], dtype=torch.float32))


x_train, y_train = windows(prices[:n_train])
x_test, y_test = windows(prices[n_train:])
print(x_train.shape, y_train.shape, x_test.shape, y_test.shape)


class GRU(nn.Module):
    def __init__(self, input_dim=1, hidden_dim=32, num_layers=2, output_dim=1):
        super(GRU, self).__init__()
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.gru = nn.GRU(input_dim, hidden_dim, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_dim, output_dim)

    def forward(self, x):
        h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_dim)
        out, hn = self.gru(x, h0)
        return self.fc(out[:, -1, :])


model = GRU()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
num_epochs = 100
hist = np.zeros(num_epochs)

for t in range(num_epochs):
    model.train()
    y_pred = model(x_train)
    loss = criterion(y_pred, y_train)
    hist[t] = loss.item()
    loss = torch.tensor(loss.item(), requires_grad=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if t % 10 == 0:
        print("Epoch ", t, "MSE: ", hist[t])

model.eval()
with torch.no_grad():
    pred = scaler.inverse_transform(model(x_test).numpy())
true = scaler.inverse_transform(y_test.numpy())
print("Test RMSE: %.2f" % np.sqrt(np.mean((pred - true) ** 2)))
torch.save(model.state_dict(), "gru.pt")
