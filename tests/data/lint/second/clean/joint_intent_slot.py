"""Joint intent and slot model with projected conflicting gradients on the shared encoder."""
import torch
from torch import nn
from torch.utils.data import DataLoader

from atis import ATIS, collate

CFG = dict(lr=1e-3, epochs=30, batch=64, seed=10)


class JointModel(nn.Module):
    def __init__(self, vocab, intents, slots, d=128):
        super().__init__()
        self.encoder = nn.ModuleDict({"emb": nn.Embedding(vocab, d), "rnn": nn.LSTM(d, d, bidirectional=True, batch_first=True)})
        self.intent = nn.Linear(2 * d, intents)
        self.slot = nn.Linear(2 * d, slots)

    def forward(self, ids):
        h, _ = self.encoder["rnn"](self.encoder["emb"](ids))
        return self.intent(h.mean(1)), self.slot(h)


def shared_vector(params):
    return torch.cat([p.grad.flatten() for p in params])


def write_back(params, vec):
    offset = 0
    for p in params:
        n = p.numel()
        p.grad.copy_(vec[offset:offset + n].view_as(p))
        offset += n


def project(a, b):
    dot = torch.dot(a, b)
    if dot < 0:
        a = a - dot / b.pow(2).sum().clamp_min(1e-12) * b
    return a


def joint_step(model, optimizer, loss_a, loss_b):
    shared = list(model.encoder.parameters())
    optimizer.zero_grad()
    loss_a.backward(retain_graph=True)
    ga = shared_vector(shared).clone()
    for p in shared:
        p.grad.zero_()
    loss_b.backward()
    gb = shared_vector(shared).clone()
    write_back(shared, project(ga, gb) + project(gb, ga))
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    right_i = n_i = right_s = n_s = 0
    for ids, intent, slots in loader:
        li, ls = model(ids.to(device))
        right_i += (li.argmax(-1).cpu() == intent).sum().item()
        n_i += len(intent)
        keep = slots != -100
        right_s += (ls.argmax(-1).cpu()[keep] == slots[keep]).sum().item()
        n_s += keep.sum().item()
    return right_i / n_i, right_s / n_s


def main():
    torch.manual_seed(CFG["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_ds, dev_ds = ATIS("train"), ATIS("dev")
    train_dl = DataLoader(train_ds, CFG["batch"], shuffle=True, collate_fn=collate)
    dev_dl = DataLoader(dev_ds, CFG["batch"], collate_fn=collate)
    model = JointModel(train_ds.vocab, train_ds.intents, train_ds.slots).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG["lr"])
    ce = nn.CrossEntropyLoss(ignore_index=-100)
    for epoch in range(CFG["epochs"]):
        model.train()
        for ids, intent, slots in train_dl:
            li, ls = model(ids.to(device))
            loss_i = ce(li, intent.to(device))
            loss_s = ce(ls.flatten(0, 1), slots.to(device).flatten())
            joint_step(model, optimizer, loss_i, loss_s)
        print(epoch, "intent %.3f slot %.3f" % evaluate(model, dev_dl, device))


if __name__ == "__main__":
    main()
