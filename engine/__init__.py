"""Lockstep: pipeline-parallel serving of language models whose stages stay in agreement.

One request, walked:

1. `frontend/app.py` takes HTTP, `frontend/tokenizer.py` makes ids of text, `frontend/link.py` sends a `Request`.
2. `leader.py` puts it into the inbox of `scheduler/sequencer.py`, which makes a numbered `Entry` of all news.
3. `leader.py` applies the entry to its own replica and sends it to every rank, with the digest of the result.
4. On every rank `stage.py` applies the entry to its replica, compares digests, and gets the same `Plan`.
5. `worker.py` computes the plan: rows come in from the stage before, go through this stage's layers
   (`model/decoder.py`, reading and writing pages of `mem_cache/pool/device.py`) and go out to the next stage.
   Pages that the plan copies between device and host go to `mem_cache/pool/mover.py`, beside the compute.
6. The last stage samples (`model/sampler.py`) and reports its tokens to the leader: news, so back to 2.
7. The entry that carries the tokens makes every replica append them; the leader sends them to the front end.
8. `frontend/detokenizer.py` makes text of them, and HTTP carries it to the client.

This module imports nothing, so that the pure half can be used without torch.
"""

__version__ = "0.1.0"
