import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from ncf_data import NCFTrain, leave_one_out

EPOCHS = 20
BATCH = 256
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class NCF(nn.Module):
    def __init__(self, num_users, num_items, dim=32):
        super().__init__()
        self.user_embedding = nn.Embedding(num_users, dim)
        self.item_embedding = nn.Embedding(num_items, dim)
        self.fc = nn.Sequential(
            nn.Linear(dim * 2, 64), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2))
        self.output = nn.Linear(32, 1)

    def forward(self, user, item):
        x = torch.cat([self.user_embedding(user), self.item_embedding(item)], dim=-1)
        x = self.output(self.fc(x))
        return torch.sigmoid(x).squeeze(-1)


def hit_ratio(model, cases, k=10):
    model.eval()
    hits = 0
    with torch.no_grad():
        for user, items in cases:
            u = torch.full((len(items),), user, device=device)
            scores = model(u, torch.tensor(items, device=device))
            hits += int(0 in scores.topk(k).indices.tolist())
    return hits / len(cases)


train_set, test_cases, n_users, n_items = leave_one_out("ml-1m/ratings.dat")
model = NCF(n_users, n_items).to(device)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(EPOCHS):
    loader = DataLoader(NCFTrain(train_set, n_items, negatives=4, seed=epoch), batch_size=BATCH, shuffle=True)
    model.train()
    running_loss = 0.0
    for user, item, label in loader:
        user, item, label = user.to(device), item.to(device), label.float().to(device)
        optimizer.zero_grad()
        prediction = model(user, item)
        loss = criterion(prediction, label)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    hr = hit_ratio(model, test_cases)
    print(f"Epoch {epoch + 1}: loss {running_loss / len(loader):.4f} HR@10 {hr:.4f}")

torch.save(model.state_dict(), "ncf.pt")
