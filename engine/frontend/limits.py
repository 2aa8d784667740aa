"""The table of limits: the most that one call may ask for. Checked before anything is allocated for it.

All are generous for honest use; each bounds memory or time that a single call could otherwise take from others.
"""

from __future__ import annotations

from typing import Final

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
"""A request body; beyond it the answer is 413."""
BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bodies of all calls that are under way together; beyond it the answer is 503."""
BODY_SECONDS_MAX: Final = 60.0
"""How long a body may take to arrive; beyond it the answer is 408."""
CHOICES_MAX: Final = 128
"""`n`, the sequences that continue one prompt."""
SEQUENCES_MAX: Final = 1024
"""Sequences of one call: the prompts of a batch, each times its `n`."""
CALL_PROMPT_TOKENS_MAX: Final = 2_000_000
"""Prompt tokens of one call, counted once per sequence: the leader's thread reads them as one log entry."""
CALL_PROMPT_LOGPROBS_MAX: Final = 200_000
"""Log probabilities of prompt tokens in one call: over all its sequences, positions times 1 + alternatives."""
MESSAGES_MAX: Final = 4096
"""Messages of one chat."""
STOP_STRINGS_MAX: Final = 32
STOP_CHARACTERS_MAX: Final = 4096
"""Characters of all stop strings of one request together; the matcher has a state for each."""
CALL_STOP_CHARACTERS_MAX: Final = 65_536
"""Characters of all different sets of stop strings of one call together."""
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
"""What a chat template may write, and the longest text or list that an operator in it, or the width of a field, may
make. Not bounded is what filters and methods make of texts that are long already (`join`, `replace`, `indent`,
`expandtabs`, `translate`), and the time of one such call: the clock is looked at between them."""
TEMPLATE_SECONDS_MAX: Final = 5.0
"""How long one rendering may take."""

CONTROL_SECONDS_MAX: Final = 5.0
"""How long a call waits for the leader's answer to a control."""
SETTLE_SECONDS_MAX: Final = 2.0
"""How long a flush waits for the ranks to be idle when no request is live any more."""
FLUSH_PAUSE_SECONDS: Final = 0.25
"""Between two tries of a flush that waits: each try is an entry of the log."""
PULSE_SECONDS_MAX: Final = 2.0
"""A leader silent for longer is not healthy, and no request is taken for it."""
UNSENT_BYTES_MAX: Final = 256 * 1024 * 1024
"""What a leader that does not read may leave unsent on the link; beyond it no request is taken."""
