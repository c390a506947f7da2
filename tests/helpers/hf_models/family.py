"""A family of models: a tiny `transformers` model, and its GGUF names and keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_gguf import finish, value_type

Array = np.ndarray[Any, np.dtype[np.float32]]
Config = Any
Change = Callable[[Array, Config], Mapping[str, Array]]

LAYER = re.compile(r"(?:model|backbone|transformer|gpt_neox)\.(?:layers|h|blocks)\.(\d+)\.(.+)")
N_TOKENS = 40


@dataclass(frozen=True)
class Family:
    """A family of models with one tiny model, which can be written as a GGUF file.

    Attributes:
        arch: value of `general.architecture`.
        like: name of a reference file with the same tensors and keys; None where there is none.
        config: returns the configuration of the model.
        metadata: returns the file's keys, without the architecture in front, from the
            configuration.
        names: GGUF name of each parameter, both without their layer, or a function that makes
            several tensors of it, or one with other values.
        extras: returns tensors of the file that are no parameters, from the configuration.
    """

    name: str
    arch: str
    like: str | None
    config: Callable[[], Config]
    metadata: Callable[[Config], dict[str, Any]]
    names: Mapping[str, str | Change]
    extras: Callable[[Config], Mapping[str, Array]] = field(default=lambda _: {})

    def build(self, path: Path) -> tuple[list[int], Array]:
        """Write a model with random weights to `path`.

        Returns:
            Token ids and the logits (ids, n_vocab) that `transformers` computes after each.
        """
        model, ids = self.made(path)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        return ids, logits.numpy()

    def made(self, path: Path) -> tuple[Any, list[int]]:
        """Write a random model to `path`; return that of `transformers`, and token ids."""
        config = self.config()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            ).eval()
        rng = np.random.default_rng(0)
        randomise(model, rng)
        self.write(path, config, {k: v.numpy() for k, v in model.state_dict().items()})
        return model, rng.integers(3, config.vocab_size, N_TOKENS).tolist()

    def write(self, path: Path, config: Config, state: Mapping[str, Array]) -> None:
        writer = GGUFWriter(path, self.arch)
        for key, value in self.metadata(config).items():
            writer.add_key_value(f"{self.arch}.{key}", value, value_type(value))
        for name, values in {**self.convert(config, state), **self.extras(config)}.items():
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        finish(writer)

    def convert(self, config: Config, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return all parameters under their GGUF names.

        Raises:
            KeyError: a parameter has no name here.
        """
        tensors: dict[str, Array] = {}
        for name, values in state.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            found = LAYER.fullmatch(name)
            prefix, suffix = (f"blk.{found[1]}.", found[2]) if found else ("", name)
            change = self.names[suffix]
            parts = {change: values} if isinstance(change, str) else change(values, config)
            tensors |= {prefix + part: value for part, value in parts.items()}
        return tensors


def randomise(model: torch.nn.Module, rng: np.random.Generator) -> None:
    """Fill a model such that every weight matters and its values stay of order one.

    Matrices are N(0, 1/sqrt(columns)); vectors get noise on their default values, so that norms
    end up near one, or near zero where one is added to them.
    """
    for name, parameter in model.state_dict().items():
        noise = rng.standard_normal(tuple(parameter.shape), np.float32)
        if name.endswith("A_log"):
            values = 0.7 * noise - 0.5
        elif name.endswith("dt_bias"):
            values = 0.5 * noise
        elif name.endswith(("sinks", "std_scale")):
            values = 1 + noise
        elif name.endswith("std_bias"):
            values = noise
        elif name.endswith(("input_min", "output_min", "input_max", "output_max")):
            values = (1.5 + 0.3 * noise) * (-1 if name.endswith("min") else 1)
        elif re.search(r"(embed_tokens\w*|embeddings|wte|wpe)\.weight$", name):
            values = 0.25 * noise
        elif re.search(r"(gate|router|router\.proj)\.weight$", name):
            values = 2 * noise / np.sqrt(noise.shape[-1])  # a clear choice of experts
        elif parameter.ndim > 1 and "bias" not in name:
            values = noise / np.sqrt(noise.shape[-1])
        else:
            values = parameter.numpy() + 0.3 * noise
        parameter.copy_(torch.from_numpy(np.asarray(values)))
