"""The demo model's tokenizer and the way a conversation becomes tokens."""

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from resources.demo.corpus import Corpus, Message

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REPLY = "<|im_start|>assistant\n"


def bare_tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """A byte-level BPE tokenizer with GPT-2's splitting, which GGUF calls "gpt-2"."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS if t in vocab])
    return tokenizer


def train_tokenizer(corpus: Corpus, n_vocab: int, seed: int) -> Tokenizer:
    """Learn the merges from conversations such as the network will see."""
    rng = random.Random(seed)
    texts = [m["content"] for _ in range(30_000) for m in corpus.conversation(rng, 1)]
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = bare_tokenizer({}, [])
    tokenizer.train_from_iterator([*texts, "system", "user", "assistant"], trainer)
    return tokenizer


class Encoder:
    """Turns conversations into token ids with the ChatML marks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id("<|im_end|>")

    def conversation(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them the network has to learn: the answers and their end."""
        ids: list[int] = []
        learn: list[bool] = []
        for message in messages:
            head = self._encode(f"<|im_start|>{message['role']}\n")
            body = self._encode(message["content"] + "<|im_end|>")
            tail = self._encode("\n")
            ids += head + body + tail
            own = message["role"] == "assistant"
            learn += [False] * len(head) + [own] * len(body) + [False] * len(tail)
        return ids, learn

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids up to where the answer begins."""
        return self.conversation(messages)[0] + self._encode(REPLY)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
