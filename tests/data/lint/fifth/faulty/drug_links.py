"""Drug-drug interaction prediction as link prediction on a graph."""
import torch
import torch.nn as nn
from torch_geometric.nn import SAGEConv
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import negative_sampling
from sklearn.metrics import roc_auc_score

from ddi import load_graph

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Encoder(nn.Module):
    def __init__(self, n, d=128):
        super().__init__()
        self.x = nn.Embedding(n, d)
        self.c1, self.c2 = SAGEConv(d, d), SAGEConv(d, d)
        self.drop = nn.Dropout(0.4)

    def forward(self, edges):
        h = self.drop(torch.relu(self.c1(self.x.weight, edges)))
        return self.c2(h, edges)


class PairScore(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, z, pairs):
        score = self.mlp(z[pairs[0]] * z[pairs[1]]).squeeze(-1)
        return torch.sigmoid(score)


def epoch_step(enc, dec, g, opt, crit):
    enc.train()
    dec.train()
    opt.zero_grad()
    z = enc(g.edge_index)
    neg = negative_sampling(g.edge_index, g.num_nodes, g.edge_label_index.size(1))
    pairs = torch.cat([g.edge_label_index, neg], 1)
    y = torch.cat([torch.ones(g.edge_label_index.size(1)), torch.zeros(neg.size(1))]).to(device)
    pred = dec(z, pairs)
    loss = crit(pred, y)
    loss.backward()
    nn.utils.clip_grad_norm_([*enc.parameters(), *dec.parameters()], 1.0)
    opt.step()
    return loss.item()


@torch.no_grad()
def auc(enc, dec, g):
    enc.eval()
    dec.eval()
    pred = dec(enc(g.edge_index), g.edge_label_index)
    return roc_auc_score(g.edge_label.cpu(), pred.cpu())


def main():
    torch.manual_seed(31)
    split = RandomLinkSplit(0.1, 0.1, is_undirected=True, add_negative_train_samples=False)
    tr, va, te = (g.to(device) for g in split(load_graph("drugbank")))
    enc, dec = Encoder(tr.num_nodes).to(device), PairScore().to(device)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=5e-3)
    crit = nn.BCEWithLogitsLoss()
    best, keep = 0.0, None
    for ep in range(400):
        loss = epoch_step(enc, dec, tr, opt, crit)
        if ep % 10 == 0:
            a = auc(enc, dec, va)
            print(f"{ep} loss {loss:.4f} val AUC {a:.4f}")
            if a > best:
                best, keep = a, ({k: v.clone() for k, v in enc.state_dict().items()},
                                 {k: v.clone() for k, v in dec.state_dict().items()})
    enc.load_state_dict(keep[0])
    dec.load_state_dict(keep[1])
    print(f"test AUC {auc(enc, dec, te):.4f}")


if __name__ == "__main__":
    main()
