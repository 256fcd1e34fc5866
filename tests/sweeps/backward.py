"""Shows where nanscan says that a backward went bad, for a NaN planted behind each module.

`make sweep` runs it: the small architectures in both scopes, and models of transformers where that
is installed. It prints each wrong answer and the count, and exits with 1 if there is one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import nn

from helpers.architectures import ARCHITECTURES, loss_of
from helpers.plants import is_same_place, sweep

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
CONFIGS = {
    "BertForMaskedLM": {"intermediate_size": 64},
    "RobertaForMaskedLM": {"intermediate_size": 64},
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTNeoXForCausalLM": {"intermediate_size": 64},
    "LlamaForCausalLM": {"intermediate_size": 64, "num_key_value_heads": 2},
    "MistralForCausalLM": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Qwen2ForCausalLM": {"intermediate_size": 64, "num_key_value_heads": 2},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {"n_head": 4, "n_layer": 2},
}


def models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]]]:
    """Each model by name, with the loss that it is trained on."""
    for name, (make, batch) in ARCHITECTURES.items():

        def build(make=make, batch=batch):
            model, x = make(), batch()
            return model, lambda: loss_of(model(x))

        yield name, build
    if find_spec("transformers") is None:
        return
    import transformers

    for name, options in CONFIGS.items():

        def build_large(name=name, options=options):
            kind = getattr(transformers, name)
            config = kind.config_class(**{**SMALL, **options, "pad_token_id": 0})
            model, tokens = kind(config).train(), torch.randint(1, 90, (2, 7))
            return model, lambda: model(input_ids=tokens, labels=tokens).loss

        yield name, build_large


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    planted = wrong = 0
    for name, build in models():
        for scope in ("model", "global"):
            torch.manual_seed(0)
            model, run = build()
            for module, said, right in sweep(model, run, scope=scope):
                planted += 1
                if not is_same_place(said, right):
                    wrong += 1
                    print(f"{name}, {scope}: planted behind {module!r}: {said}, not {right}")
    print(f"{planted} planted, {wrong} at a wrong place")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
