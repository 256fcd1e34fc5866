"""The loss is finite, a gradient is NaN: torch.where does not stop NaN in backward."""

import torch
from torch import nn

import nanscan


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, distance):
        x = self.scale * distance
        return torch.where(x > 0, x.sqrt(), torch.zeros_like(x))


def step():
    loss = model(torch.tensor([0.0, 0.5, 1.0, 2.0])).sum()
    loss.backward()


model = Energy()
print(nanscan.locate(step))
