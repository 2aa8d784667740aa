"""A whole cluster in one thread under one seed: the real sequencer and replicas, a faked wire and model."""
