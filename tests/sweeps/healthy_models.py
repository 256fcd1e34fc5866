"""Trains 40 healthy models of transformers and timm for a few steps, and generates: no finding.

Those of timm are left out, and said to be, where it is not installed. All models are small, with
random weights. Each is watched by itself and then globally, in 3 training steps, one evaluation,
and a generate loop where it can.

    python tests/sweeps/healthy_models.py [names]
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable

import torch
import transformers
from torch import nn

import nanscan

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODERS = [
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "Olmo", "Olmo2",
    "StableLm", "Cohere", "Starcoder2", "GPTNeoX", "Granite", "Glm", "Mixtral", "Ernie4_5",
]  # fmt: skip
MASKED = ["Bert", "Roberta", "Electra", "ConvBert", "RoFormer", "MPNet", "Deberta", "DebertaV2"]
IMAGES = [
    "resnet18", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050", "regnetx_002",
    "efficientnet_lite0", "densenet121", "mixer_s32_224", "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224", "edgenext_xx_small", "resnext50_32x4d", "levit_128s",
    "mobilevit_xxs",
]  # fmt: skip


def small_config(name: str) -> transformers.PretrainedConfig:
    """The model's configuration with small numbers, where it has them."""
    kind = getattr(transformers, f"{name}Config")
    extra = {"num_key_value_heads": 2, "head_dim": 8, "embedding_size": 32, "num_local_experts": 4}
    known = kind()
    wanted = {**SMALL, **extra}
    given = {k: v for k, v in wanted.items() if hasattr(known, k)}
    return kind(**given)


def text_model(name: str, head: str) -> tuple[nn.Module, Callable[[], torch.Tensor], bool]:
    """A language model, a function that gives its loss, and whether it can generate."""
    model = getattr(transformers, f"{name}For{head}")(small_config(name))
    tokens = torch.randint(3, 99, (4, 12))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0  # padding on the left
    labels = tokens.masked_fill(mask == 0, -100)
    return (
        model,
        lambda: model(input_ids=tokens, attention_mask=mask, labels=labels).loss,
        head == "CausalLM",
    )


def image_model(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor], bool]:
    """A classifier and a function that gives its loss."""
    import timm

    model = timm.create_model(name, num_classes=5)
    size = model.default_cfg["input_size"][-1]
    images, labels = torch.randn(2, 3, size, size), torch.tensor([1, 3])

    def loss() -> torch.Tensor:
        out = model(images)
        return nn.functional.cross_entropy(out[0] if isinstance(out, tuple) else out, labels)

    return model, loss, False


def run(name: str, make: Callable[[], tuple], scope: str) -> list[str]:
    """What nanscan says of a healthy run."""
    torch.manual_seed(0)
    model, loss, can_generate = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    told: list[str] = []
    with nanscan.watch(
        model if scope == "model" else None, action=lambda finding: told.append(str(finding))
    ) as monitor:
        model.train()
        for _ in range(3):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss()
        if can_generate:
            prompt = torch.randint(3, 99, (2, 5))
            for options in ({}, {"do_sample": True, "top_k": 5, "top_p": 0.9}, {"num_beams": 3}):
                model.generate(prompt, max_new_tokens=8, **options)
        monitor.flush()
        told += [str(finding) for finding in monitor.findings if str(finding) not in told]
        if not value.isfinite() or monitor.healthy is not True:
            told.append(f"loss {value}, healthy {monitor.healthy}")
    return told


def main() -> None:
    """Runs all models, or those named."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    makers = {name: (lambda name=name: text_model(name, "CausalLM")) for name in DECODERS}
    makers |= {name: (lambda name=name: text_model(name, "MaskedLM")) for name in MASKED}
    if importlib.util.find_spec("timm"):
        makers |= {name: (lambda name=name: image_model(name)) for name in IMAGES}
    else:
        print(f"timm is not installed: {len(IMAGES)} models are left out")
    failed = 0
    for name in sys.argv[1:] or makers:
        for scope in ("model", "global"):
            said = run(name, makers[name], scope)
            failed += bool(said)
            print(f"{name:32} {scope:7} {'clean' if not said else said[0]}", flush=True)
    print(f"{len(makers)} models, {failed} runs with a finding")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
