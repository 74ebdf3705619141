"""Linear probe on frozen sentence embeddings, fitted with LBFGS."""
import sys

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from corpora import read_tsv


def embed(encoder, texts):
    with torch.inference_mode():
        out = encoder.encode(texts, convert_to_tensor=True, batch_size=256)
    return out.float().clone()


def fit_probe(x, y, n_classes, l2=1e-3, max_outer=20):
    w = torch.zeros(n_classes, x.size(1), device=x.device, requires_grad=True)
    b = torch.zeros(n_classes, device=x.device, requires_grad=True)
    opt = torch.optim.LBFGS([w, b], lr=1.0, max_iter=20, history_size=10, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(F.linear(x, w, b), y) + l2 * w.pow(2).sum()
        loss.backward()
        return loss

    previous = float("inf")
    for outer in range(max_outer):
        loss = opt.step(closure)
        value = loss.item()
        print(f"outer {outer}: objective {value:.5f}")
        if previous - value < 1e-6:
            break
        previous = value
    return w.detach(), b.detach()


def accuracy(x, y, w, b):
    return (F.linear(x, w, b).argmax(-1) == y).float().mean().item()


def main(train_file, dev_file, test_file):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = SentenceTransformer("all-MiniLM-L6-v2", device=device)
    splits = {}
    labels = {}
    for name, path in (("train", train_file), ("dev", dev_file), ("test", test_file)):
        texts, tags = read_tsv(path)
        for t in tags:
            labels.setdefault(t, len(labels))
        splits[name] = (embed(encoder, texts), torch.tensor([labels[t] for t in tags], device=device))

    best = (-1.0, None, None)
    for l2 in (1e-4, 1e-3, 1e-2, 1e-1):
        w, b = fit_probe(*splits["train"], len(labels), l2=l2)
        dev = accuracy(*splits["dev"], w, b)
        fit = accuracy(*splits["train"], w, b)
        print(f"l2={l2:g} train={fit:.4f} dev={dev:.4f} gap={fit - dev:.4f}")
        if dev > best[0]:
            best = (dev, w, b)
    print("test accuracy", accuracy(*splits["test"], best[1], best[2]))


if __name__ == "__main__":
    main(*sys.argv[1:4])
