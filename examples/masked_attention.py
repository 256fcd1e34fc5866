"""A sample that is all padding has no finite score. The loss is finite, the gradients are NaN."""

import torch
from torch import nn

import nanscan


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, padding):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        return torch.softmax(scores, dim=-1) @ self.v(x)


torch.manual_seed(0)
model = Attention(16)
tokens, lengths = torch.randn(4, 6, 16), torch.tensor([6, 3, 0, 5])
padding = torch.arange(6) >= lengths[:, None]  # True where there is no token


def step():
    loss = model(tokens, padding)[~padding].pow(2).mean()
    loss.backward()
    print(f"loss {loss.item():.4f}, gradient of v.weight {model.v.weight.grad.sum().item()}")


print(nanscan.locate(step))
