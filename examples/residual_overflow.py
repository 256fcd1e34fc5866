"""A residual net under float16 autocast: one branch outgrows the other, and the sum overflows."""

import torch
from torch import nn
from torch.nn import functional as F

import nanscan


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        x_1 = self.conv1(x)
        x_3 = self.conv2(F.relu(x_1))
        x_out = x_1 + x_3
        return self.pool(x_out)


torch.manual_seed(0)
model = nn.Sequential(Block(8), Block(8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
images, target = torch.rand(4, 8, 16, 16), torch.full((4,), 1e6)  # nobody scaled the target
monitor = nanscan.enable(model, action=lambda finding: None, skip_step=True, locate=True)
while not monitor.located:
    with torch.autocast("cpu", torch.float16):
        out = model(images)
    loss = F.l1_loss(out.float().mean((1, 2, 3)), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(monitor.located[0].finding)
print(monitor.located[0])
