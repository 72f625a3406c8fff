"""What is asked of the model: a document, some questions about it, and a second turn."""

from __future__ import annotations

from importlib import resources
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["FOLLOW_UP", "QUESTIONS", "Talk"]

SYSTEM = "You answer questions about a handbook, briefly and exactly."
QUESTIONS = (
    "Who planted the elder bush behind the oil store?",
    "What is the boat called, and how long is she?",
    "What is the goat called, and what are his duties?",
)
FOLLOW_UP = "And in which year was that?"


class Talk:
    """Prompts as token ids. All begin with the same document, cut to `document_tokens` tokens if that is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, document_tokens: int | None = None) -> None:
        self._tokenizer: Any = tokenizer
        text = (resources.files("lmcache_core.demo") / "data" / "handbook.md").read_text(encoding="utf-8")
        ids = self._ids(text)
        if document_tokens is not None and document_tokens < len(ids):
            text = str(self._tokenizer.decode(ids[:document_tokens]))
        self.document = text
        end: Any = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.end = int(end)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def first_turn(self, question: str) -> list[int]:
        """The document and a question about it."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{self.document}\n\n{question}"},
        ]
        ids: list[int] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        return ids

    def next_turn(self, prompt: list[int], answer: list[int], question: str) -> list[int]:
        """What was said before, token by token, and another question."""
        said = self.spoken(answer)
        more = f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return [*prompt, *said, self.end, *self._ids(more)]

    def spoken(self, answer: list[int]) -> list[int]:
        """An answer up to the model's own end of it."""
        return answer[: answer.index(self.end)] if self.end in answer else answer

    def text(self, answer: list[int]) -> str:
        """An answer for people."""
        decoded: str = self._tokenizer.decode(self.spoken(answer), skip_special_tokens=True)
        return decoded.strip()
