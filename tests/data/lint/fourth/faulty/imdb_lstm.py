import torch
import torch.nn as nn
import torch.optim as optim

from imdb import get_iterators

BATCH_SIZE = 64
EMBEDDING_DIM = 100
HIDDEN_DIM = 256
N_EPOCHS = 5
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class SentimentLSTM(nn.Module):
    def __init__(self, vocab_size, pad_idx):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, EMBEDDING_DIM, padding_idx=pad_idx)
        self.lstm = nn.LSTM(EMBEDDING_DIM, HIDDEN_DIM, num_layers=2, bidirectional=True, dropout=0.5, batch_first=True)
        self.fc = nn.Linear(HIDDEN_DIM * 2, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, text, lengths):
        emb = self.dropout(self.embedding(text))
        packed = nn.utils.rnn.pack_padded_sequence(emb, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.fc(self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1))).squeeze(1)


def binary_accuracy(preds, y):
    return (torch.round(torch.sigmoid(preds)) == y).float().mean()


def train(model, iterator, optimizer, criterion):
    epoch_loss, epoch_acc = 0, 0
    model.train()
    for text, lengths, labels in iterator:
        text, labels = text.to(device), labels.to(device)
        optimizer.zero_grad()
        predictions = model(text, lengths)
        loss = criterion(predictions, labels)
        loss.backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        epoch_loss += loss.item()
        epoch_acc += binary_accuracy(predictions, labels).item()
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


def evaluate(model, iterator, criterion):
    epoch_loss, epoch_acc = 0, 0
    model.eval()
    with torch.no_grad():
        for text, lengths, labels in iterator:
            text, labels = text.to(device), labels.to(device)
            predictions = model(text, lengths)
            epoch_loss += criterion(predictions, labels).item()
            epoch_acc += binary_accuracy(predictions, labels).item()
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


if __name__ == "__main__":
    train_it, valid_it, vocab = get_iterators(BATCH_SIZE)
    model = SentimentLSTM(len(vocab), vocab["<pad>"]).to(device)
    optimizer = optim.Adam(model.parameters())
    criterion = nn.BCEWithLogitsLoss()
    best_valid_loss = float("inf")
    for epoch in range(N_EPOCHS):
        train_loss, train_acc = train(model, train_it, optimizer, criterion)
        valid_loss, valid_acc = evaluate(model, valid_it, criterion)
        if valid_loss < best_valid_loss:
            best_valid_loss = valid_loss
            torch.save(model.state_dict(), "sentiment.pt")
        print(f"Epoch: {epoch + 1:02} | Train {train_loss:.3f} {train_acc * 100:.2f}% | Val {valid_loss:.3f} {valid_acc * 100:.2f}%")
