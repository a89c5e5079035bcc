"""The models and batches that benchmarks run, each a plain PyTorch training step.

Each function takes ``large``: sizes for a GPU instead of ones that take two CPU cores seconds at
most. Models of Hugging Face are built from their configurations, with random weights: nothing is
downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize


@dataclass(frozen=True)
class Workload:
    """A model, a batch, and the per-example loss that ties them.

    Attributes:
        cu_seqlens: (B + 1,) the rows at which the examples begin, of those packed into one row.
        precision: makes the context in which libraries that compute beside the backward need it to
            run; autocast itself is part of ``loss_fn``.
        bar_norms, bar_training: ratios to plain training that are aimed at, if any.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, ...]
    loss_fn: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    bar_norms: float | None = None
    bar_training: float | None = None
    precision: Callable[[], AbstractContextManager] = nullcontext
    cu_seqlens: Tensor | None = None

    @property
    def examples(self) -> int:
        """The number of examples B."""
        return len(self.batch[0]) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def replace_model(self, model: nn.Module) -> Workload:
        """Return the same work with another model."""
        return dataclasses.replace(self, model=model)

    def on(self, device: str, dtype: str = "float32") -> Workload:
        """Return the same work on a device and in a precision.

        Args:
            device: "cpu" or "cuda".
            dtype: one of ``DTYPES``: "bfloat16" is that of weights and data, "autocast" is to it.
        """
        kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        batch = tuple(
            part.to(device, kind if part.is_floating_point() else None) for part in self.batch
        )
        work = dataclasses.replace(self, model=self.model.to(device, kind), batch=batch)
        if dtype != "autocast":
            return work

        def precision() -> AbstractContextManager:
            return torch.autocast(device, torch.bfloat16)

        def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            with precision():
                return self.loss_fn(model, batch)

        return dataclasses.replace(work, loss_fn=loss_fn, precision=precision)


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's logits, in float32 at least, from a tensor or an output of Hugging Face."""
    result = model(inputs)
    logits = getattr(result, "logits", result)
    return logits.float() if logits.itemsize < 4 else logits


def classification(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return one cross-entropy for each example."""
    inputs, labels = batch
    return functional.cross_entropy(logits_of(model, inputs), labels, reduction="none")


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy of each sequence."""
    tokens, targets = batch
    logits = logits_of(model, tokens)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


def shifted(batch: int, positions: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and those that follow them."""
    tokens = torch.randint(vocabulary, (batch, positions + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    """Return random images of three channels with labels of a thousand classes."""
    return torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))


def mlp(large: bool = False) -> Workload:
    """MLP 784-2048-2048-10, B = 256."""
    model = nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    batch = (torch.randn(256, 784), torch.randint(10, (256,)))
    return Workload("MLP 784-2048-2048-10, B=256", model, batch, classification, 0.70, 1.05)


def cnn(large: bool = False) -> Workload:
    """The network of PyTorch's per-sample-gradients tutorial, B = 64."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    batch = (torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    return Workload("CNN of the tutorial, B=64", model, batch, classification, 1.10, 1.20)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        q, k, v = (
            part.view(batch, positions, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.contract(functional.gelu(self.expand(self.norm_mlp(x))))


class Transformer(nn.Module):
    """A decoder-only transformer with learned positions.

    Args:
        expand: look positions up once for each example, as libraries need that take the first axis
            of every layer for that of the examples.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        positions: int,
        expand: bool = False,
    ):
        super().__init__()
        self.expand = expand
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        if self.expand:
            positions = positions.repeat(len(ids), 1)
        x = self.tokens(ids) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def gpt(large: bool = False) -> Workload:
    """4 layers, width 256, T = 128, B = 16, V = 1000."""
    model = Transformer(layers=4, width=256, heads=4, vocabulary=1000, positions=128)
    name = "GPT 4×256, T=128, B=16, V=1000"
    return Workload(name, model, shifted(16, 128, 1000), next_token, 0.90, 1.10)


def gpt_expanded(large: bool = False) -> Workload:
    """The same with positions looked up for each example, which more libraries can follow."""
    model = Transformer(layers=4, width=256, heads=4, vocabulary=1000, positions=128, expand=True)
    name = "GPT 4×256 with (B, T) positions"
    return Workload(name, model, shifted(16, 128, 1000), next_token)


def small(large: bool = False) -> Workload:
    """An MLP so small that Python is most of its time."""
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    batch = (torch.randn(32, 64), torch.randint(10, (32,)))
    return Workload("small MLP 64-32-32-10, B=32", model, batch, classification)


class LowRank(nn.Module):
    """Adds a trained product of two narrow matrices to a frozen weight."""

    def __init__(self, shape: torch.Size, rank: int = 8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(shape[0], rank) / shape[0] ** 0.5)
        self.down = nn.Parameter(torch.randn(rank, shape[1]) / shape[1] ** 0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 2.0 * (self.up @ self.down)


class Pruned(nn.Module):
    """Leaves one in ten of a weight's elements."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.register_buffer("mask", (torch.rand(shape) < 0.1).float())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def parametrised(model: nn.Module, make: Callable[[torch.Size], nn.Module]) -> nn.Module:
    """Compute the weights of all linear layers by a module of their own."""
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(layer, "weight", make(layer.weight.shape))
    return model


def adapted(large: bool = False) -> Workload:
    """The GPT of 4 layers with low-rank updates merged into frozen weights."""
    work = gpt(large)
    model = parametrised(work.model.requires_grad_(False), LowRank)
    name = "GPT 4×256, merged low-rank updates"
    return Workload(name, model, work.batch, next_token)


def pruned(large: bool = False) -> Workload:
    """The MLP with weights that a mask multiplies."""
    work = mlp(large)
    model = parametrised(work.model, Pruned)
    return Workload("MLP 784-2048-2048-10, pruned", model, work.batch, classification)


def normalised(large: bool = False) -> Workload:
    """The MLP with directions and lengths of its rows for weights."""
    work = mlp(large)
    for layer in [module for module in work.model.modules() if isinstance(module, nn.Linear)]:
        parametrizations.weight_norm(layer)
    return Workload("MLP 784-2048-2048-10, weight norm", work.model, work.batch, classification)


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


def lstm(large: bool = False) -> Workload:
    """A 2-layer LSTM on sequences."""
    batch, positions, width = (64, 256, 512) if large else (16, 32, 128)
    name = f"LSTM 2×{width}, T={positions}, B={batch}, V=1000"
    return Workload(name, Recurrent(width, 1000), shifted(batch, positions, 1000), next_token)


class Bottleneck(nn.Module):
    """A residual block of three convolutions with group normalisation."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.GroupNorm(32, outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(large: bool = False) -> Workload:
    """ResNet-50 with GroupNorm in place of BatchNorm."""
    batch, side = (64, 224) if large else (8, 64)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    name = f"ResNet-50 with GroupNorm, {side}×{side}, B={batch}"
    return Workload(name, model, images(batch, side), classification)


def convnext(large: bool = False) -> Workload:
    """ConvNeXt-T of Hugging Face."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    batch, side = (64, 224) if large else (8, 64)
    model = ConvNextForImageClassification(ConvNextConfig(num_labels=1000, image_size=side))
    name = f"ConvNeXt-T, {side}×{side}, B={batch}"
    return Workload(name, model, images(batch, side), classification)


def vit(large: bool = False) -> Workload:
    """ViT-B/16 of Hugging Face."""
    from transformers import ViTConfig, ViTForImageClassification

    batch, side = (64, 224) if large else (4, 96)
    model = ViTForImageClassification(ViTConfig(num_labels=1000, image_size=side))
    name = f"ViT-B/16, {side}×{side}, B={batch}"
    return Workload(name, model, images(batch, side), classification)


def gpt2(large: bool = False) -> Workload:
    """GPT-2 small of Hugging Face, tied embeddings, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    batch, positions = (8, 1024) if large else (2, 128)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    name = f"GPT-2 small, T={positions}, B={batch}"
    tokens = shifted(batch, positions, config.vocab_size)
    bars = (0.85, 1.10) if large else (None, None)
    return Workload(name, GPT2LMHeadModel(config), tokens, next_token, *bars)


def gpt2_wide(large: bool = False) -> Workload:
    """The same with four times the batch, where a GPU has more to do than the host."""
    work = gpt2(large)
    batch, positions = work.batch[0].shape
    tokens = shifted(4 * batch, positions, work.model.config.vocab_size)
    name = f"GPT-2 small, T={positions}, B={4 * batch}"
    return dataclasses.replace(work, name=name, batch=tokens)


def llama(large: bool = False) -> Workload:
    """A Llama-style model of a billion parameters; two layers of it without ``large``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, positions, layers = (4, 1024, 16) if large else (1, 32, 2)
    vocabulary = 128256 if large else 8000
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=2048, intermediate_size=8192, use_cache=False,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=positions, tie_word_embeddings=True,
    )  # fmt: skip
    name = f"Llama {layers}×2048, T={positions}, B={batch}, V={vocabulary}"
    tokens = shifted(batch, positions, vocabulary)
    return Workload(name, LlamaForCausalLM(config), tokens, next_token)


WORKLOADS = {
    "mlp": mlp, "cnn": cnn, "gpt": gpt, "gpt-expanded": gpt_expanded, "small": small,
    "lstm": lstm, "resnet": resnet, "convnext": convnext, "vit": vit, "gpt2": gpt2,
    "gpt2-wide": gpt2_wide, "llama": llama, "adapted": adapted, "pruned": pruned,
    "normalised": normalised,
}  # fmt: skip
DEFAULT = ("mlp", "cnn", "gpt")
DTYPES = ("float32", "autocast", "bfloat16")


def build(name: str, device: str = "cpu", dtype: str = "float32") -> Workload:
    """Return one of ``WORKLOADS``, the same each time: sizes for the device, in a precision."""
    torch.manual_seed(0)
    return WORKLOADS[name](large=device == "cuda").on(device, dtype)
