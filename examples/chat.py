"""Talk to a served model with the OpenAI client: start `make serve`, then `python examples/chat.py "Your question"`.

Needs `pip install openai`.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    """Ask once and print the answer as it comes, then what of the prompt was cached."""
    client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")
    model = client.models.list().data[0].id
    question = " ".join(sys.argv[1:]) or "What is a pipeline?"
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {cached} cached]")


if __name__ == "__main__":
    main()
