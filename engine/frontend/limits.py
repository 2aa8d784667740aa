"""The table of limits: the most that one call may ask for. Checked before anything is allocated for it.

All are generous for honest use; each bounds memory or time that a single call could otherwise take from others.
"""

from __future__ import annotations

from typing import Final

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
"""A request body; beyond it the answer is 413."""
CHOICES_MAX: Final = 128
"""`n`, the sequences that continue one prompt."""
SEQUENCES_MAX: Final = 1024
"""Sequences of one call: the prompts of a batch, each times its `n`."""
CALL_PROMPT_TOKENS_MAX: Final = 16_000_000
"""Prompt tokens of one call, counted once per sequence: they share one frame to the leader (256 MiB)."""
MESSAGES_MAX: Final = 4096
"""Messages of one chat."""
STOP_STRINGS_MAX: Final = 32
STOP_CHARACTERS_MAX: Final = 4096
"""Characters of all stop strings of one request together; the matcher has a state for each."""
STOP_TOKEN_IDS_MAX: Final = 256
LOGIT_BIAS_MAX: Final = 1024
"""Entries of `logit_bias`."""
TOP_LOGPROBS_MAX: Final = 128
"""Alternatives shown with each log probability."""
RID_CHARACTERS_MAX: Final = 256
"""`rid` and `cache_salt`."""

TEXT_THREADS: Final = 2
"""Threads that tokenise, render templates and detokenise long texts beside the event loop."""
TEXT_JOBS_MAX: Final = 512
"""Such jobs waiting at once; beyond it the answer is 429."""
INLINE_BYTES_MAX: Final = 64 * 1024
"""A body up to here is parsed on the event loop; a longer one by a text thread."""

TEMPLATE_CHARACTERS_MAX: Final = 256 * 1024
"""A chat template's source."""
RENDERED_CHARACTERS_MAX: Final = 16 * 1024 * 1024
"""What a chat template may write, and the longest list or string that an operator in it may make."""
TEMPLATE_SECONDS_MAX: Final = 5.0
"""How long one rendering may take."""

CONTROL_SECONDS_MAX: Final = 5.0
"""How long a call waits for the leader's answer to a control."""
SETTLE_SECONDS_MAX: Final = 2.0
"""How long a flush waits for the ranks to be idle when no request is live any more."""
PULSE_SECONDS_MAX: Final = 2.0
"""A leader silent for longer is not healthy."""
