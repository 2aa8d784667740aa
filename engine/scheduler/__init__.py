"""The pure half's decisions: inbox to entry (`sequencer`), entry to plan (`scheduler`)."""
