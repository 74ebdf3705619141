import torch
import torch.nn.functional as F
import torch.optim as optim


def gram(x):
    b, c, h, w = x.shape
    f = x.view(b * c, h * w)
    return f @ f.t() / (b * c * h * w)


def run(features, content, style, steps=300, style_weight=1e6):
    image = content.clone().requires_grad_(True)
    want_style = [gram(f).detach() for f in features(style)]
    want_content = [f.detach() for f in features(content)]
    optimizer = optim.LBFGS([image])
    count = [0]
    while count[0] <= steps:

        def closure():
            with torch.no_grad():
                image.clamp_(0, 1)
            optimizer.zero_grad()
            got = features(image)
            style_score = sum(F.mse_loss(gram(g), w) for g, w in zip(got, want_style)) * style_weight
            content_score = F.mse_loss(got[3], want_content[3])
            loss = style_score + content_score
            loss.backward()
            count[0] += 1
            return loss

        optimizer.step(closure)
    adam = optim.Adam([image], lr=0.5)
    for _ in range(50):
        adam.zero_grad()
        loss = F.mse_loss(features(image)[3], want_content[3])
        loss.backward()
        adam.step()
    return image.detach()
