import itertools

import torch


class CycleGAN:
    def __init__(self, nets, lr=2e-4):
        self.G_A, self.G_B, self.D_A, self.D_B = nets
        self.opt_G = torch.optim.Adam(
            itertools.chain(self.G_A.parameters(), self.G_B.parameters()), lr=lr, betas=(0.5, 0.999)
        )
        self.opt_D = torch.optim.Adam(
            itertools.chain(self.D_A.parameters(), self.D_B.parameters()), lr=lr, betas=(0.5, 0.999)
        )
        self.optimizers = [self.opt_G, self.opt_D]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 100) for o in self.optimizers]
        self.gan, self.cycle = torch.nn.MSELoss(), torch.nn.L1Loss()

    def set_requires_grad(self, nets, flag):
        for net in nets:
            for p in net.parameters():
                p.requires_grad = flag

    def forward(self):
        self.fake_B = self.G_A(self.real_A)
        self.rec_A = self.G_B(self.fake_B)

    def backward_D(self, net, real, fake):
        pred_real, pred_fake = net(real), net(fake.detach())
        loss = 0.5 * (
            self.gan(pred_real, torch.ones_like(pred_real)) + self.gan(pred_fake, torch.zeros_like(pred_fake))
        )
        loss.backward()
        return loss

    def backward_G(self):
        pred = self.D_A(self.fake_B)
        self.loss_G = self.gan(pred, torch.ones_like(pred)) + 10.0 * self.cycle(self.rec_A, self.real_A)
        self.loss_G.backward()

    def optimize_parameters(self, real_A, real_B):
        self.real_A, self.real_B = real_A, real_B
        self.forward()
        self.set_requires_grad([self.D_A, self.D_B], False)
        self.opt_G.zero_grad()
        self.backward_G()
        self.opt_G.step()
        self.set_requires_grad([self.D_A, self.D_B], True)
        self.opt_D.zero_grad()
        self.backward_D(self.D_A, self.real_B, self.fake_B)
        self.opt_D.step()

    def update_learning_rate(self):
        for scheduler in self.schedulers:
            scheduler.step()


def main(nets, loader, epochs=200):
    model = CycleGAN(nets)
    for epoch in range(epochs):
        for a, b in loader:
            model.optimize_parameters(a, b)
        model.update_learning_rate()
