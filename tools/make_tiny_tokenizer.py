"""Writes the tiny vocabulary, megatron_gptoss/data/tiny_tokenizer.json. In: nothing. Out: the file named by the first argument.

It is trained on the fixed phrases of the arithmetic task, so that a tool call is 11 to 13 tokens instead of about 70: sampled tokens are
what reinforcement learning on a CPU pays for. It does not run in training; the file ships with the package.
"""

import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_gptoss.data.tokenizer import TINY_FILE

SPECIAL = ["<|pad|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
PHRASES = [  # what stands between special tokens in one transcript
    "developer", "# Tools\nfunctions.calc(expression)", "user", "(37+58)*4", "assistant",
    "commentary to=functions.calc ", "json", '{"expression":"37+58"}', "functions.calc to=assistant", "commentary", "95",
    "assistant", "final", "380", "functions.calc to=assistant", "commentary", "error",
]  # fmt: skip


def make() -> Tokenizer:
    """Digits, operators and parentheses are cut out before merging, so they stay one token each; all 256 bytes are in the vocabulary."""
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"[0-9+*()-]"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(PHRASES * 50, trainer)  # often enough that every pair passes the trainer's minimum frequency
    return bpe


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TINY_FILE
    target.write_text(make().to_str(pretty=True) + "\n")
    print(f"{target}: {make().get_vocab_size()} ids")
