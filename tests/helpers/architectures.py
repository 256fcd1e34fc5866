"""Twenty small architectures of torch.nn, each with a batch, for sweeps of planted faults."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.models import Do

WIDTH = 8


def linear(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Returns(nn.Module):
    """Its output is the very tensor that its child returned."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, *args):
        return self.child(*args)


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = linear(outputs=3 * WIDTH), linear()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block with layer scale: parameters of its own beside those of its children."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = Attention()
        self.mlp = nn.Sequential(linear(outputs=16), nn.GELU(), linear(16))
        self.scale1, self.scale2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x):
        x = x + self.scale1 * self.attend(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))


class GPT(nn.Module):
    """With positions as a parameter of its own, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 11, bias=False)  # registered first, and run last
        self.tokens = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(6, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Its class token and positions are used first, by the module that returns last."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = linear()

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class DenseNet(nn.Module):
    """Each layer reads what all before it made."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 * i), nn.ReLU(), nn.Conv2d(4 * i, 4, 3, padding=1))
            for i in range(1, 4)
        )
        self.head = linear(16)

    def forward(self, x):
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in "abc")
        self.head = linear(3 * WIDTH)

    def forward(self, x):
        return self.head(torch.cat([branch(x) for branch in self.branches], 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)  # registered before what runs before it
        self.down = nn.Conv2d(4, 8, 2, 2)
        self.stem, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        wide = self.stem(x).relu()
        deep = self.norm(self.middle(self.down(wide))).relu()
        return self.head(torch.cat([wide, self.up(deep)], 1))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.gate = nn.Sequential(linear(4, 2), nn.ReLU(), linear(2, 4), nn.Sigmoid())
        self.head = linear(4)

    def forward(self, x):
        x = self.conv(x)
        return self.head((x * self.gate(x.mean((2, 3)))[..., None, None]).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = linear(outputs=11)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


class Cells(nn.Module):
    """One cell that is called for each step in time."""

    def __init__(self):
        super().__init__()
        self.head, self.cell, self.inputs = linear(), nn.GRUCell(WIDTH, WIDTH), linear()

    def forward(self, x):
        state = torch.zeros(len(x), WIDTH)
        for _ in range(3):
            state = self.cell(self.inputs(x), state)
        return self.head(state)


class Siamese(nn.Module):
    """An encoder that is called twice, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(linear(), nn.Tanh(), linear())
        self.unused, self.head = linear(), linear(2 * WIDTH)

    def forward(self, x):
        return self.head(torch.cat([self.encoder(x), self.encoder(-x)], 1))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.head = linear(outputs=3), linear()
        self.experts = nn.ModuleList(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in "abc")

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head((made * weights[:, None]).sum(-1))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(linear(), nn.ReLU(), linear())
        self.mean, self.scale = linear(), linear()
        self.encoder = nn.Sequential(linear(), nn.ReLU())

    def forward(self, x):
        x = self.encoder(x)
        return self.decoder(self.mean(x) + self.scale(x).tanh().exp() * torch.ones_like(x))


class Translates(nn.Module):
    """Encoder and decoder with cross attention, by torch's own layers."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, **options)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, **options)
        self.head = linear(outputs=11)

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(self.decoder(x, self.encoder(x)))


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first, self.last = linear(), linear()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in "ab")
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Adapter(nn.Module):
    """LoRA: a frozen layer, and two of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = linear(), linear(outputs=2), linear(2)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def rows():
    return torch.randn(4, WIDTH)


def images():
    return torch.randn(4, 1, 8, 8)


def tokens():
    return torch.randint(11, (3, 6))


def norm_mixer():
    mixer = nn.Sequential(Do(lambda x: x.mT), linear(4, 4), nn.GELU(), Do(lambda x: x.mT))
    return nn.Sequential(Residual(mixer), nn.LayerNorm(WIDTH), Residual(linear()), linear())


def weight_normed():
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(linear()), nn.Tanh(), norm(linear()))


def residual_cnn():
    def block():
        layers = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        return Residual(nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)))

    return nn.Sequential(nn.Conv2d(1, 4, 3), block(), block(), nn.Flatten(), linear(4 * 36))


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.ReLU(), linear()), rows),
    "nested": (lambda: Returns(nn.Sequential(linear(), Returns(Returns(linear())))), rows),
    "resnet": (residual_cnn, images),
    "densenet": (DenseNet, images),
    "inception": (Inception, rows),
    "unet": (UNet, images),
    "squeeze-excite": (SqueezeExcite, images),
    "gpt": (GPT, tokens),
    "vit": (ViT, images),
    "encoder-decoder": (Translates, tokens),
    "lstm": (Recurrent, tokens),
    "cells": (Cells, rows),
    "siamese": (Siamese, rows),
    "experts": (Experts, rows),
    "vae": (VAE, rows),
    "mixer": (norm_mixer, rows),
    "lora": (lambda: nn.Sequential(linear(), Adapter(), nn.Tanh(), Adapter()), rows),
    "weight norm": (weight_normed, rows),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), rows),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), rows),
}


def loss_of(output):
    return output.square().mean()
