import torch
import torch.nn.functional as F


def embed(model, tokens):
    out = model(**tokens).last_hidden_state
    return F.normalize(out.mean(1), dim=-1)


def train_step(model, optimizer, chunks, temperature=0.05):
    """Embeds without a graph, takes the gradient of the loss by the embeddings, then backpropagates chunk by chunk."""
    with torch.no_grad():
        cached = [(embed(model, a), embed(model, b)) for a, b in chunks]
    left = torch.cat([a for a, _ in cached]).requires_grad_(True)
    right = torch.cat([b for _, b in cached]).requires_grad_(True)
    labels = torch.arange(len(left), device=left.device)
    loss = F.cross_entropy(left @ right.T / temperature, labels)
    loss.backward()
    optimizer.zero_grad()
    at = 0
    for a, b in chunks:
        ea, eb = embed(model, a), embed(model, b)
        span = slice(at, at + len(ea))
        torch.autograd.backward([ea, eb], [left.grad[span], right.grad[span]])
        at += len(ea)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
