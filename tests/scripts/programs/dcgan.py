"""DCGAN as in tutorials: D on real, D on fake, then G, two optimizers, one step function."""

import torch
import torch.nn as nn
import torch.optim as optim

import treadle

torch.manual_seed(999)
nz, ngf, ndf, nc = 8, 4, 4, 1
real_label, fake_label = 1.0, 0.0


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 3, 1, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))


def gan_step(real, noise):
    netD.zero_grad()
    label = torch.full((real.size(0),), real_label)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    fake = netG(noise)
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    label.fill_(real_label)
    errG = criterion(netD(fake), label)
    errG.backward()
    optimizerG.step()
    return (errD_real + errD_fake).detach(), errG.detach()


step = treadle.compile(gan_step, model=[netG, netD], optimizer=[optimizerD, optimizerG])
fixed_noise = torch.randn(4, nz, 1, 1)
G_losses, D_losses, pictures = [], [], []
iters = 0
for epoch in range(2):
    for i in range(3):
        lossD, lossG = step(torch.rand(6, nc, 8, 8) * 2 - 1, torch.randn(6, nz, 1, 1))
        G_losses.append(lossG.item())
        D_losses.append(lossD.item())
        if iters % 3 == 0:
            with torch.no_grad():
                pictures.append(netG(fixed_noise).detach())
        iters += 1
    print(f"[{epoch}/2] D {D_losses[-1]:.4f} G {G_losses[-1]:.4f}")
