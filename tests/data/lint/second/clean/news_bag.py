import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import random_split

from agnews import NewsDataset, build_vocab, tokenize

EPOCHS = 10
LR = 5.0
BATCH_SIZE = 64
EMSIZE = 64

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
vocab = build_vocab("train.csv")


class BagModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self._init()

    def _init(self):
        self.embedding.weight.data.uniform_(-0.5, 0.5)
        self.fc.weight.data.uniform_(-0.5, 0.5)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


def collate_batch(batch):
    labels, texts, offsets = [], [], [0]
    for label, line in batch:
        ids = torch.tensor(vocab.lookup(tokenize(line)), dtype=torch.int64)
        labels.append(label - 1)
        texts.append(ids)
        offsets.append(ids.size(0))
    return (torch.tensor(labels).to(device), torch.cat(texts).to(device),
            torch.tensor(offsets[:-1]).cumsum(dim=0).to(device))


model = BagModel(len(vocab), EMSIZE, 4).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1.0, gamma=0.1)


def train(dataloader, epoch, log_interval=500):
    model.train()
    total_acc, total_count = 0, 0
    for idx, (label, text, offsets) in enumerate(dataloader):
        optimizer.zero_grad()
        predicted = model(text, offsets)
        loss = criterion(predicted, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        total_acc += (predicted.argmax(1) == label).sum().item()
        total_count += label.size(0)
        if idx % log_interval == 0 and idx > 0:
            print(f"| epoch {epoch} | {idx}/{len(dataloader)} | accuracy {total_acc / total_count:.3f}")
            total_acc, total_count = 0, 0


def evaluate(dataloader):
    model.eval()
    total_acc, total_count = 0, 0
    with torch.no_grad():
        for label, text, offsets in dataloader:
            predicted = model(text, offsets)
            total_acc += (predicted.argmax(1) == label).sum().item()
            total_count += label.size(0)
    return total_acc / total_count


full = NewsDataset("train.csv")
n_train = int(len(full) * 0.95)
split_train, split_valid = random_split(full, [n_train, len(full) - n_train])
train_dataloader = DataLoader(split_train, BATCH_SIZE, shuffle=True, collate_fn=collate_batch)
valid_dataloader = DataLoader(split_valid, BATCH_SIZE, collate_fn=collate_batch)
test_dataloader = DataLoader(NewsDataset("test.csv"), BATCH_SIZE, collate_fn=collate_batch)

total_accu = None
for epoch in range(1, EPOCHS + 1):
    t = time.time()
    train(train_dataloader, epoch)
    accu_val = evaluate(valid_dataloader)
    if total_accu is not None and total_accu > accu_val:
        scheduler.step()
    else:
        total_accu = accu_val
    print(f"| end of epoch {epoch} | {time.time() - t:.1f}s | valid accuracy {accu_val:.3f}")
print("test accuracy", evaluate(test_dataloader))
